-- Frequency caps: at most so many messages of a class to one recipient in a window of time. A place is taken inside the
-- claim, under a lock of the recipient's own, and belongs to the send for all its attempts. And a claim of a new send
-- writes its row once, and a claim that comes second takes no lock of it.

-- The caps. The daemon keeps here what its settings say, so that senders in any language keep to them.
CREATE TABLE frequency_cap (
    message_class text PRIMARY KEY,
    most int NOT NULL CHECK (most BETWEEN 1 AND 1000),
    span interval CHECK (span > interval '0'),  -- a window that slides, or ...
    calendar text CHECK (calendar IN ('day', 'week', 'month')),  -- ... one that begins with the day, ...
    zone text NOT NULL DEFAULT 'UTC',           -- ... in this zone, by the database's clock
    changed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (num_nonnulls(span, calendar) = 1)
);

-- Who had how many of them lately: the places that were taken, the newest first. One row a recipient and class, which is
-- the lock as well. Addresses are compared without case.
CREATE TABLE cap_taken (
    recipient_key text NOT NULL CHECK (recipient_key = lower(recipient_key)),
    message_class text NOT NULL,
    wire_keys text[] NOT NULL DEFAULT '{}',
    taken_at timestamptz[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (recipient_key, message_class),
    CHECK (cardinality(wire_keys) = cardinality(taken_at))
);
CREATE INDEX cap_taken_last ON cap_taken ((taken_at[1]));

ALTER TABLE send_log ADD COLUMN capped_until timestamptz;  -- when a send that a cap refused may be claimed

-- Says that a send has surely reached nobody, so that it takes no place: each attempt was proved not to have left, or the
-- only one that did was refused by the provider. What nobody can tell keeps its place, as does what a person declared
-- failed, or silence.
CREATE FUNCTION send_reached_nobody(r send_log) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT r.state IN ('pending', 'claimed') AND r.attempt = r.not_sent_attempts
        OR r.state = 'failed' AND (r.attempt = r.not_sent_attempts
            OR r.attempt = r.not_sent_attempts + 1 AND (r.verdict_source = 'sender' OR r.verdict_reason = 'rejected'))
$$;

-- Where a window that holds `t` begins: what was taken later than this counts. Where clocks are set back over midnight
-- there are two: in the hour before the second one, everything since the day before counts.
CREATE FUNCTION cap_since(c frequency_cap, t timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT coalesce(t - c.span, interval '-1 microsecond' + CASE
        WHEN date_trunc(c.calendar, t, c.zone) <= t THEN date_trunc(c.calendar, t, c.zone)
        ELSE date_trunc(c.calendar, t - interval '3 hours', c.zone) END)
$$;

-- Where the calendar's window that holds `t` ends; NULL for one that slides.
CREATE FUNCTION cap_end(c frequency_cap, t timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE AS $$
    SELECT (date_trunc(c.calendar, t AT TIME ZONE c.zone) + ('1 ' || c.calendar)::interval) AT TIME ZONE c.zone
$$;

-- The cap of a class, or NULL. The settings know a class that only the environment names with hyphens.
CREATE FUNCTION cap_of(class text) RETURNS frequency_cap
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT c FROM frequency_cap c WHERE c.message_class IN (class, replace(class, '_', '-'))
    ORDER BY c.message_class = class DESC LIMIT 1
$$;

-- Takes the place of a send under the cap of its class, or finds that all are taken: NULL where it has one, else when
-- the next one comes free, if no send gives up its own before. Others who want one for this recipient wait for the
-- caller's commit: whoever claims several sends in one transaction may come into a deadlock, and then claims again.
CREATE FUNCTION cap_take(r send_log, c frequency_cap) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    address CONSTANT text := lower(r.recipient_key);
    had cap_taken;
    keys text[];
    times timestamptz[];
    t timestamptz;
BEGIN
    SELECT * INTO had FROM cap_taken h WHERE h.recipient_key = address AND h.message_class = c.message_class FOR UPDATE;  -- lock
    IF NOT FOUND THEN
        INSERT INTO cap_taken AS h (recipient_key, message_class) VALUES (address, c.message_class)
        ON CONFLICT (recipient_key, message_class) DO UPDATE SET message_class = h.message_class
        RETURNING h.* INTO had;
    END IF;
    t := clock_timestamp();
    SELECT coalesce(array_agg(s.k ORDER BY s.at DESC, s.k), '{}'), coalesce(array_agg(s.at ORDER BY s.at DESC, s.k), '{}')
    INTO keys, times  -- and look: this snapshot is newer than the lock
    FROM unnest(had.wire_keys, had.taken_at) AS s(k, at)
    WHERE s.at > cap_since(c, t) AND s.k <> r.wire_key
      AND NOT EXISTS (SELECT FROM send_log l WHERE l.wire_key = s.k AND send_reached_nobody(l));
    IF cardinality(keys) >= c.most THEN
        RETURN coalesce(times[c.most] + c.span, cap_end(c, t));
    END IF;
    UPDATE cap_taken h SET wire_keys = r.wire_key || keys, taken_at = t || times
    WHERE h.recipient_key = address AND h.message_class = c.message_class;
    RETURN NULL;
END $$;

-- Inserts the row of a send unless it is there, pending or, where `claimed_at` is given, claimed; returns it, or NULL.
CREATE FUNCTION send_insert_as(w text, key text, feed text, options jsonb, claimed_at timestamptz, submit_within interval)
RETURNS send_log
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    claimed CONSTANT boolean := send_insert_as.claimed_at IS NOT NULL;
    until CONSTANT timestamptz := send_insert_as.claimed_at + submit_within;
    r send_log;
BEGIN
    INSERT INTO send_log (wire_key, send_key, feed, message_class, recipient, recipient_key, campaign, source,
        fingerprint, payload, intended_at, not_before, expires_at, known_message_id,
        state, attempt, fence, nonce, claimed_by, first_claimed_at, claimed_at, submit_by, next_check_at)
    VALUES (w, key, send_insert_as.feed, coalesce(options ->> 'message_class', 'default'), options ->> 'recipient',
        CASE WHEN options ->> 'recipient' NOT LIKE '%,%' THEN recipient_key(options ->> 'recipient') END,
        options ->> 'campaign', options ->> 'source', options ->> 'fingerprint', options -> 'payload',
        (options ->> 'intended_at')::timestamptz, (options ->> 'not_before')::timestamptz,
        (options ->> 'expires_at')::timestamptz, options ->> 'known_message_id',
        CASE WHEN claimed THEN 'claimed' ELSE 'pending' END, claimed::int, CASE WHEN claimed THEN nextval('send_fence') END,
        CASE WHEN claimed THEN options ->> 'nonce' END, CASE WHEN claimed THEN options ->> 'claimed_by' END,
        send_insert_as.claimed_at, send_insert_as.claimed_at, until,
        coalesce(until, (options ->> 'expires_at')::timestamptz))
    ON CONFLICT (wire_key) DO NOTHING
    RETURNING * INTO r;
    RETURN r;
END $$;

-- As in 0005: inserts the pending row of a send unless it is there; returns whether it was inserted.
CREATE OR REPLACE FUNCTION send_insert(w text, key text, feed text, options jsonb) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT (send_insert_as(w, key, feed, options, NULL, NULL)).wire_key IS NOT NULL
$$;

-- As in 0014, and a failed send that is asked for again is noted, too: its row must not be pruned, or it would be sent.
ALTER TABLE asked_again DROP CONSTRAINT asked_again_asked_as_check,
    ADD CONSTRAINT asked_again_asked_as_check CHECK (asked_as IN ('already_sent', 'failed', 'key_reused'));
CREATE OR REPLACE FUNCTION send_standing(r send_log, key text, feed text, options jsonb, t timestamptz)
RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint, seconds_left double precision, reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF NOT send_is_same(r.send_key, r.fingerprint, key, options ->> 'fingerprint') THEN
        PERFORM send_note_asked_again(r.wire_key, 'key_reused', t);
        RETURN QUERY SELECT 'key_reused', r.wire_key, NULL::int, NULL::bigint, NULL::double precision,
            CASE WHEN r.send_key = key THEN 'the content differs' ELSE 'another send key has this wire key' END, NULL::timestamptz;
    ELSIF r.state = 'claimed' AND r.nonce = options ->> 'nonce' AND r.submit_by > t AND r.feed = send_standing.feed
          AND r.cause IS NULL  -- whoever has said how the attempt went can't have lost the claim's answer
          AND send_heard(r.wire_key, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id) IS NULL THEN
        RETURN QUERY SELECT 'claimed', r.wire_key, r.attempt, r.fence,
            extract(epoch FROM r.submit_by - t)::double precision, NULL, NULL::timestamptz;
    ELSIF r.state <> 'pending' THEN
        IF coalesce(r.sent_at, r.failed_at) < t - interval '10 minutes' THEN
            PERFORM send_note_asked_again(r.wire_key, CASE r.state WHEN 'sent' THEN 'already_sent' ELSE 'failed' END, t);
        END IF;
        RETURN QUERY SELECT CASE r.state WHEN 'sent' THEN 'already_sent' WHEN 'claimed' THEN 'in_flight' ELSE 'failed' END,
            r.wire_key, NULL::int, NULL::bigint, NULL::double precision, coalesce(r.held_reason, r.verdict_reason),
            CASE WHEN r.state = 'claimed' THEN r.next_check_at END;
    END IF;
END $$;

-- Why a locked row, of which nothing may have been heard, is not given out: (outcome, reason, when to ask again), or NULLs.
CREATE FUNCTION send_objection(r send_log, heard text, feed text, options jsonb, submit_within interval, t timestamptz,
    OUT outcome text, OUT reason text, OUT retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    cap frequency_cap;
BEGIN
    IF heard = 'accepted' THEN
        outcome := 'already_sent';
        reason := 'accepted';
        RETURN;
    ELSIF heard IS NOT NULL THEN
        outcome := 'held';
        reason := CASE heard WHEN 'rejected' THEN 'rejected' ELSE 'unknown_event' END;
        RETURN;
    END IF;
    IF r.attempt = 0 AND r.intended_at < r.created_at - (SELECT memory FROM installation) THEN
        outcome := 'beyond_memory';
        reason := 'the job was older than the guard''s memory when it was enqueued';
        RETURN;
    END IF;
    SELECT * INTO outcome, reason, retry_at FROM send_refusal(r, feed, options, submit_within, t);
    IF outcome IS NOT NULL THEN RETURN; END IF;
    cap := cap_of(r.message_class);
    IF cap.message_class IS NULL THEN
        RETURN;
    ELSIF r.recipient_key IS NULL AND r.state = 'claimed' THEN
        RAISE EXCEPTION 'message class % has a frequency cap: claim its sends with one recipient each', quote_literal(r.message_class)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF r.recipient_key IS NULL THEN  -- it was there before the cap was
        outcome := 'held';
        reason := 'cap_needs_recipient';
        RETURN;
    END IF;
    retry_at := cap_take(r, cap);
    IF retry_at IS NOT NULL THEN
        outcome := 'capped';
        reason := 'frequency_cap';
    END IF;
END $$;

-- As in 0013, and an event without our key is looked for only where the send has a message id, each by its own key: while
-- the tables have no statistics, the planner would read all of them.
CREATE OR REPLACE FUNCTION send_heard(w text, f text, recipient_key text, provider_message_id text, known_message_id text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    by_key CONSTANT text[] := ARRAY(SELECT testimony FROM provider_event WHERE wire_key = w);
    by_id text[];
BEGIN
    IF num_nonnulls($4, $5) > 0 THEN
        by_id := ARRAY(
            SELECT e.testimony
            FROM (SELECT $2 AS feed UNION
                  SELECT v.feed FROM verdict v WHERE v.wire_key = $1 AND v.action = 'released' AND v.feed IS NOT NULL) AS via
            CROSS JOIN (VALUES ($4), ($5)) AS known(id)
            CROSS JOIN LATERAL (
                SELECT e.testimony, e.recipient FROM provider_event e WHERE e.wire_key = stand_in_key(via.feed, known.id)
                OFFSET 0) AS e
            WHERE NOT EXISTS (
                SELECT FROM send_log l
                WHERE l.feed = via.feed AND (l.provider_message_id = known.id OR l.known_message_id = known.id)
                  AND l.wire_key <> $1
                  AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient))
              AND (e.recipient IS NULL OR $3 IS NULL OR e.recipient = $3));
    END IF;
    RETURN CASE WHEN 'accepted' = ANY (by_key || by_id) THEN 'accepted'
                WHEN 'rejected' = ANY (by_key || by_id) THEN 'rejected'
                WHEN cardinality(by_key || by_id) > 0 THEN 'none' END;
END $$;

-- As in 0004, likewise.
CREATE OR REPLACE FUNCTION send_outcome(r send_log) RETURNS float8[]
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    keys CONSTANT text[] := ARRAY[r.wire_key, stand_in_key(r.feed, r.provider_message_id), stand_in_key(r.feed, r.known_message_id)];
BEGIN
    RETURN (
        SELECT max(ARRAY[delivery_rank(e.kind), extract(epoch FROM coalesce(e.occurred_at, e.received_at))]::float8[])
        FROM provider_event e
        WHERE e.wire_key = ANY (keys)
          AND (e.wire_key = r.wire_key OR e.recipient IS NULL OR r.recipient_key IS NULL OR r.recipient_key = e.recipient));
END $$;

-- How long an attempt may take. In seconds, since a day or month of an interval has no fixed length.
CREATE FUNCTION send_submit_within(options jsonb) RETURNS interval
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    asked CONSTANT interval := make_interval(
        secs => extract(epoch FROM coalesce((options ->> 'submit_within')::interval, '60 seconds'))::float8);
BEGIN
    IF asked <= interval '0' OR asked > interval '1 day' THEN
        RAISE EXCEPTION 'submit_within must lie between 0 and 1 day' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN asked;
END $$;

-- As in 0005, with caps. The row of a new send is inserted as claimed, which locks it: only what is then found out, that
-- something was heard of it or forbids it, makes it pending again. (Not that of a campaign, which looks at its claimed
-- rows.) Whoever finds the row there looks at it without a lock first: a crowd must not stand in the winner's way.
CREATE OR REPLACE FUNCTION send_claim(key text, feed text, options jsonb)
RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint, seconds_left double precision, reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    w text;
    r send_log;
    t timestamptz := clock_timestamp();
    submit_within interval;
    heard text;
    new_fence bigint;
    fresh boolean := false;
BEGIN
    PERFORM send_check_isolation();
    PERFORM send_check_call(key, feed, options, ARRAY['message_class', 'recipient', 'campaign', 'source', 'submit_within',
        'not_before', 'expires_at', 'fingerprint', 'payload', 'claimed_by', 'known_message_id', 'intended_at', 'nonce']);
    submit_within := send_submit_within(options);
    w := wire_key(key);
    wire_key := w;

    SELECT * INTO r FROM send_log l WHERE l.wire_key = w;
    IF NOT FOUND THEN
        IF (options ->> 'intended_at')::timestamptz < t - (SELECT memory FROM installation) THEN
            outcome := 'beyond_memory';
            reason := 'the job is older than the guard''s memory';
            RETURN NEXT;
            RETURN;
        END IF;
        r := send_insert_as(w, key, feed, options, CASE WHEN options ->> 'campaign' IS NULL THEN t END, submit_within);
        fresh := coalesce(r.state = 'claimed', false);
        IF r.wire_key IS NULL THEN
            SELECT * INTO r FROM send_log l WHERE l.wire_key = w;  -- somebody was quicker
        END IF;
    END IF;
    IF NOT fresh THEN
        RETURN QUERY SELECT * FROM send_standing(r, key, feed, options, t);  -- a cheap refusal, without a lock
        IF FOUND THEN RETURN; END IF;
        SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;  -- lock
        IF NOT FOUND THEN
            RAISE EXCEPTION 'the row was deleted meanwhile: call again' USING ERRCODE = 'serialization_failure';
        END IF;
        t := clock_timestamp();
        RETURN QUERY SELECT * FROM send_standing(r, key, feed, options, t);
        IF FOUND THEN RETURN; END IF;
        IF num_nulls(r.recipient, r.recipient_key) = 2 AND options ->> 'recipient' IS NOT NULL THEN
            UPDATE send_log l SET recipient = options ->> 'recipient',
                recipient_key = CASE WHEN options ->> 'recipient' NOT LIKE '%,%' THEN recipient_key(options ->> 'recipient') END
            WHERE l.wire_key = w AND l.state = 'pending' AND l.recipient IS NULL AND l.recipient_key IS NULL
            RETURNING * INTO r;
        END IF;
    END IF;

    heard := send_heard(w, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id);  -- and look
    SELECT o.* INTO outcome, reason, retry_at FROM send_objection(r, heard, feed, options, submit_within, t) AS o;
    IF outcome IS NULL AND fresh THEN
        IF clock_timestamp() > t + interval '0.1 s' THEN  -- it waited for somebody: its time begins now
            t := clock_timestamp();
            UPDATE send_log l SET claimed_at = t, first_claimed_at = t, submit_by = t + submit_within, next_check_at = t + submit_within
            WHERE l.wire_key = w AND l.state = 'claimed' AND l.fence = r.fence;
        END IF;
        RETURN QUERY SELECT 'claimed', w, r.attempt, r.fence, extract(epoch FROM submit_within)::double precision,
            NULL, NULL::timestamptz;
        RETURN;
    ELSIF fresh THEN
        UPDATE send_log l SET state = 'pending', attempt = 0, fence = NULL, nonce = NULL, claimed_by = NULL,
            first_claimed_at = NULL, claimed_at = NULL, submit_by = NULL, next_check_at = l.expires_at
        WHERE l.wire_key = w AND l.state = 'claimed' AND l.fence = r.fence
        RETURNING * INTO r;
    END IF;
    IF outcome IS NOT NULL THEN
        -- A row that is held or expired is looked at by the next pass, which decides what becomes of it.
        IF outcome = 'already_sent' THEN
            PERFORM send_settle(r, 'sent', 'accepted', 'feed', 'send_claim', NULL, t);
        ELSIF outcome IN ('held', 'expired') AND reason NOT IN ('not_before', 'cap_needs_recipient') THEN
            UPDATE send_log l SET next_check_at = t, updated_at = t WHERE l.wire_key = w AND l.state = 'pending';
        ELSIF outcome = 'capped' THEN
            UPDATE send_log l SET capped_until = send_claim.retry_at, updated_at = t,  -- what is released is told again then
                next_check_at = CASE WHEN l.released_at IS NULL THEN l.next_check_at
                    ELSE least(send_claim.retry_at, l.expires_at, l.retry_until) END
            WHERE l.wire_key = w AND l.state = 'pending' AND l.capped_until IS DISTINCT FROM send_claim.retry_at;
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;

    t := clock_timestamp();
    new_fence := nextval('send_fence');
    UPDATE send_log l SET state = 'claimed', attempt = l.attempt + 1, fence = new_fence, nonce = options ->> 'nonce',
        feed = send_claim.feed, claimed_by = options ->> 'claimed_by', claimed_at = t,
        first_claimed_at = coalesce(l.first_claimed_at, t), submit_by = t + submit_within, next_check_at = t + submit_within,
        fingerprint = coalesce(l.fingerprint, options ->> 'fingerprint'), payload = coalesce(l.payload, options -> 'payload'),
        known_message_id = coalesce(l.known_message_id, options ->> 'known_message_id'), cause = NULL, capped_until = NULL,
        released_at = NULL, release_basis = NULL, retry_until = NULL, may_failover = false, told = 0,
        held_reason = NULL, held_since = NULL, updated_at = t
    WHERE l.wire_key = w AND l.state = 'pending';
    RETURN QUERY SELECT 'claimed', w, r.attempt + 1, new_fence, extract(epoch FROM submit_within)::double precision,
        NULL, NULL::timestamptz;
END $$;
