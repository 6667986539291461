-- The sender's protocol. One shape for ever: a change of contract is a new name. Lock first, look afterwards: the row is
-- locked in one statement and testimony looked for in a later one, whose snapshot is newer than the lock.

-- Refuses an isolation level under which whoever looks for evidence looks with a snapshot from before the lock.
CREATE FUNCTION send_check_isolation() RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'this needs READ COMMITTED: an older snapshot can''t see evidence'
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
END $$;

-- Refuses what would be a programming error of the sender, in one line. A time that isn't one of our era (infinity, a
-- year of five digits) would stop every pass: drivers can't read it.
CREATE FUNCTION send_check_call(key text, feed text, options jsonb, known text[]) RETURNS void
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    unknown text;
    wrong text;
BEGIN
    IF key IS NULL OR key = '' OR octet_length(key) > 255 THEN
        RAISE EXCEPTION 'a send key is text of 1 to 255 bytes, this one has %', coalesce(octet_length(key), 0)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF feed IS NULL OR feed !~ '^[a-z0-9][a-z0-9-]*$' THEN
        RAISE EXCEPTION 'not a feed''s name: %', coalesce(quote_literal(feed), 'NULL') USING ERRCODE = 'invalid_parameter_value';
    ELSIF jsonb_typeof(options) IS DISTINCT FROM 'object' THEN
        RAISE EXCEPTION 'options must be a JSON object' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    unknown := (SELECT string_agg(name, ', ') FROM jsonb_object_keys(options) AS name WHERE name <> ALL (known));
    IF unknown IS NOT NULL THEN
        RAISE EXCEPTION 'unknown option: %', unknown
            USING ERRCODE = 'invalid_parameter_value', HINT = 'known: ' || array_to_string(known, ', ');
    END IF;
    wrong := (SELECT string_agg(name, ', ') FROM jsonb_each(options) AS o(name, value)
              WHERE name NOT IN ('payload', 'response') AND jsonb_typeof(value) IN ('object', 'array', 'boolean'));
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'this option must be text or a number: %', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    wrong := (SELECT string_agg(name, ', ') FROM jsonb_each_text(options) AS o(name, value)
              WHERE name IN ('not_before', 'expires_at', 'intended_at')
                AND value::timestamptz NOT BETWEEN '1970-01-01' AND '9999-01-01');
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'not a time between the years 1970 and 9999: %', wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- Says whether a row may stand for this send: same key and, where both are known, same content.
CREATE FUNCTION send_is_same(row_key text, row_fingerprint text, key text, fingerprint text) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT row_key = key AND (row_fingerprint IS NULL OR fingerprint IS NULL OR row_fingerprint = fingerprint)
$$;

-- Inserts the pending row of a send unless it is there; returns whether it was inserted.
CREATE FUNCTION send_insert(w text, key text, feed text, options jsonb) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO send_log (wire_key, send_key, feed, message_class, recipient, recipient_key, campaign, source,
        fingerprint, payload, intended_at, not_before, expires_at, known_message_id, next_check_at)
    VALUES (w, key, feed, coalesce(options ->> 'message_class', 'default'), options ->> 'recipient',
        CASE WHEN options ->> 'recipient' NOT LIKE '%,%' THEN recipient_key(options ->> 'recipient') END,
        options ->> 'campaign', options ->> 'source', options ->> 'fingerprint', options -> 'payload',
        (options ->> 'intended_at')::timestamptz, (options ->> 'not_before')::timestamptz,
        (options ->> 'expires_at')::timestamptz, options ->> 'known_message_id', (options ->> 'expires_at')::timestamptz)
    ON CONFLICT (wire_key) DO NOTHING;
    RETURN FOUND;
END $$;

-- Gives a locked row free for another attempt, and writes the verdict.
CREATE FUNCTION send_free(r send_log, basis text, source text, who text, note text, t timestamptz)
RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE send_log l SET state = 'pending', not_sent_attempts = l.not_sent_attempts + (basis = 'not_sent')::int,
        released_at = t, release_basis = basis, retry_until = NULL, next_check_at = t, told = 0, failed_at = NULL,
        verdict_source = NULL, verdict_reason = NULL, held_reason = NULL, held_since = NULL, updated_at = t
    WHERE l.wire_key = r.wire_key AND l.state = r.state AND l.fence IS NOT DISTINCT FROM r.fence;
    INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, note)
    VALUES (r.wire_key, r.attempt, r.fence, 'released', basis, source, who, r.feed, r.claimed_at, r.submit_by, note);
    RETURN QUERY SELECT 'released', basis;
END $$;

-- Ends a locked row as sent or failed (action), and writes the verdict.
CREATE FUNCTION send_settle(r send_log, action text, why text, source text, who text, note text, t timestamptz)
RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE send_log l SET state = action, sent_at = CASE WHEN action = 'sent' THEN t END,
        failed_at = CASE WHEN action = 'failed' THEN t END, verdict_source = send_settle.source, verdict_reason = why,
        next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL, held_reason = NULL,
        held_since = NULL, updated_at = t
    WHERE l.wire_key = r.wire_key AND l.state = r.state AND l.fence IS NOT DISTINCT FROM r.fence;
    PERFORM send_note_delivery(r.wire_key);
    INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, note)
    VALUES (r.wire_key, r.attempt, r.fence, action, why, source, who, r.feed, r.claimed_at, r.submit_by, note);
    UPDATE release_outbox o SET cancelled_at = t WHERE o.wire_key = r.wire_key AND o.delivered_at IS NULL AND o.cancelled_at IS NULL;
    RETURN QUERY SELECT action, why;
END $$;

-- Writes a send that is to be claimed later, in the caller's own transaction.
-- Outcomes: enqueued, exists (the row was there already), key_reused.
CREATE FUNCTION send_enqueue(key text, feed text, options jsonb) RETURNS TABLE (outcome text, wire_key text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    w text;
    r record;
BEGIN
    PERFORM send_check_call(key, feed, options, ARRAY['message_class', 'recipient', 'campaign', 'source', 'not_before',
        'expires_at', 'fingerprint', 'payload', 'known_message_id', 'intended_at']);
    w := wire_key(key);
    IF send_insert(w, key, feed, options) THEN
        RETURN QUERY SELECT 'enqueued', w;
        RETURN;
    END IF;
    SELECT l.send_key, l.fingerprint INTO r FROM send_log l WHERE l.wire_key = w;
    RETURN QUERY SELECT CASE WHEN send_is_same(r.send_key, r.fingerprint, key, options ->> 'fingerprint')
        THEN 'exists' ELSE 'key_reused' END, w;
END $$;

-- The hold under which a feed is, or NULL.
CREATE FUNCTION send_hold(feed text) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN bool_or(s.suspect_at IS NOT NULL) THEN 'suspect'
                WHEN bool_or(s.paused_at IS NOT NULL) THEN 'paused'
                WHEN bool_or(s.breaker_at IS NOT NULL) THEN 'breaker' END
    FROM feed_state s WHERE s.feed IN ($1, '*')
$$;

-- Why a pending row may not be given out now, apart from testimony: (outcome, reason, when to ask again), or no row.
CREATE FUNCTION send_refusal(r send_log, feed text, options jsonb, submit_within interval, t timestamptz)
RETURNS TABLE (outcome text, reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    hold text;
    reached CONSTANT boolean := r.attempt > r.not_sent_attempts;
    by_pass CONSTANT boolean := coalesce(r.release_basis IN ('same_key_retry', 'looked_up', 'absent', 'gave_up'), false);
BEGIN
    IF r.expires_at <= t THEN
        RETURN QUERY SELECT 'expired', 'expires_at has passed', NULL::timestamptz;
    ELSIF r.not_before > t THEN
        RETURN QUERY SELECT 'held', 'not_before', r.not_before;
    ELSIF reached AND r.feed <> feed AND NOT r.may_failover THEN
        RETURN QUERY SELECT 'other_feed', 'an attempt on ' || r.feed || ' may have been accepted', NULL::timestamptz;
    ELSIF r.release_basis = 'same_key_retry' AND options ->> 'fingerprint' IS NULL THEN
        RETURN QUERY SELECT 'key_reused', 'a same-key retry needs the fingerprint', NULL::timestamptz;
    ELSIF r.retry_until < t + submit_within THEN
        RETURN QUERY SELECT 'held', 'retry_window_over', NULL::timestamptz;
    ELSE
        -- A feed that may have gone back in time gives out nothing; pause and breaker stop what a pass released. Whoever
        -- pauses waits for the lock: once `pause` has returned, nothing that a pass released is given out. Those whom a
        -- hold refuses anyway don't take it, they would keep `pause` waiting.
        hold := send_hold(feed);
        IF hold IS NULL AND by_pass THEN
            PERFORM FROM feed_state s WHERE s.feed = '*' FOR KEY SHARE;
            hold := send_hold(feed);
        END IF;
        IF hold = 'suspect' OR hold IS NOT NULL AND by_pass THEN
            RETURN QUERY SELECT 'held', hold, NULL::timestamptz;
        END IF;
    END IF;
END $$;

-- What a row that is no longer pending answers a claim; no row where it is pending and may be claimed.
CREATE FUNCTION send_standing(r send_log, key text, feed text, options jsonb, t timestamptz)
RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint, seconds_left double precision, reason text, retry_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF NOT send_is_same(r.send_key, r.fingerprint, key, options ->> 'fingerprint') THEN
        RETURN QUERY SELECT 'key_reused', r.wire_key, NULL::int, NULL::bigint, NULL::double precision,
            CASE WHEN r.send_key = key THEN 'the content differs' ELSE 'another send key has this wire key' END, NULL::timestamptz;
    ELSIF r.state = 'claimed' AND r.nonce = options ->> 'nonce' AND r.submit_by > t AND r.feed = send_standing.feed
          AND r.cause IS NULL THEN  -- whoever has said how the attempt went can't have lost the claim's answer
        RETURN QUERY SELECT 'claimed', r.wire_key, r.attempt, r.fence,
            extract(epoch FROM r.submit_by - t)::double precision, NULL, NULL::timestamptz;
    ELSIF r.state <> 'pending' THEN
        RETURN QUERY SELECT CASE r.state WHEN 'sent' THEN 'already_sent' WHEN 'claimed' THEN 'in_flight' ELSE 'failed' END,
            r.wire_key, NULL::int, NULL::bigint, NULL::double precision, coalesce(r.held_reason, r.verdict_reason),
            CASE WHEN r.state = 'claimed' THEN r.next_check_at END;
    END IF;
END $$;

-- Takes the exclusive right to submit. Outcomes: claimed, already_sent, in_flight, failed, capped, expired, key_reused,
-- other_feed, held, beyond_memory. Commit it before the provider is called: see send_claim_commit. A time without a zone
-- is one of UTC, whatever the session's zone is.
CREATE FUNCTION send_claim(key text, feed text, options jsonb)
RETURNS TABLE (outcome text, wire_key text, attempt int, fence bigint, seconds_left double precision, reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    w text;
    r send_log;
    heard text;
    t timestamptz := clock_timestamp();
    submit_within interval;
    new_fence bigint;
BEGIN
    PERFORM send_check_isolation();
    PERFORM send_check_call(key, feed, options, ARRAY['message_class', 'recipient', 'campaign', 'source', 'submit_within',
        'not_before', 'expires_at', 'fingerprint', 'payload', 'claimed_by', 'known_message_id', 'intended_at', 'nonce']);
    -- In seconds, since a day or month of an interval has no fixed length.
    submit_within := make_interval(secs => extract(epoch FROM coalesce((options ->> 'submit_within')::interval, '60 seconds'))::float8);
    IF submit_within <= interval '0' OR submit_within > interval '1 day' THEN
        RAISE EXCEPTION 'submit_within must lie between 0 and 1 day' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    w := wire_key(key);
    wire_key := w;

    SELECT * INTO r FROM send_log l WHERE l.wire_key = w;  -- a cheap refusal, without a lock
    IF FOUND THEN
        RETURN QUERY SELECT * FROM send_standing(r, key, feed, options, t);
        IF FOUND THEN RETURN; END IF;
    ELSIF (options ->> 'intended_at')::timestamptz < t - (SELECT memory FROM installation) THEN
        outcome := 'beyond_memory';
        reason := 'the job is older than the guard''s memory';
        RETURN NEXT;
        RETURN;
    ELSE
        PERFORM send_insert(w, key, feed, options);
    END IF;

    SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;  -- lock
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the row was deleted meanwhile: call again' USING ERRCODE = 'serialization_failure';
    END IF;
    t := clock_timestamp();
    RETURN QUERY SELECT * FROM send_standing(r, key, feed, options, t);
    IF FOUND THEN RETURN; END IF;

    heard := send_heard(w, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id);  -- and look
    IF heard = 'accepted' THEN
        PERFORM send_settle(r, 'sent', 'accepted', 'feed', 'send_claim', NULL, t);
        outcome := 'already_sent';
        reason := 'accepted';
        RETURN NEXT;
        RETURN;
    END IF;

    IF heard IS NOT NULL THEN
        outcome := 'held';
        reason := CASE heard WHEN 'rejected' THEN 'rejected' ELSE 'unknown_event' END;
    ELSE
        SELECT * INTO outcome, reason, retry_at FROM send_refusal(r, feed, options, submit_within, t);
    END IF;
    IF outcome IS NOT NULL THEN
        -- A row that is held or expired is looked at by the next pass, which decides what becomes of it.
        IF outcome IN ('held', 'expired') AND reason <> 'not_before' THEN
            UPDATE send_log l SET next_check_at = t, updated_at = t WHERE l.wire_key = w AND l.state = 'pending';
        END IF;
        RETURN NEXT;
        RETURN;
    END IF;

    new_fence := nextval('send_fence');
    UPDATE send_log l SET state = 'claimed', attempt = l.attempt + 1, fence = new_fence, nonce = options ->> 'nonce',
        feed = send_claim.feed, claimed_by = options ->> 'claimed_by', claimed_at = t,
        first_claimed_at = coalesce(l.first_claimed_at, t), submit_by = t + submit_within, next_check_at = t + submit_within,
        fingerprint = coalesce(l.fingerprint, options ->> 'fingerprint'), payload = coalesce(l.payload, options -> 'payload'),
        recipient = coalesce(l.recipient, options ->> 'recipient'),
        recipient_key = coalesce(l.recipient_key,
            CASE WHEN coalesce(l.recipient, options ->> 'recipient') NOT LIKE '%,%' THEN recipient_key(options ->> 'recipient') END),
        known_message_id = coalesce(l.known_message_id, options ->> 'known_message_id'), cause = NULL,
        released_at = NULL, release_basis = NULL, retry_until = NULL, may_failover = false, told = 0,
        held_reason = NULL, held_since = NULL, updated_at = t
    WHERE l.wire_key = w AND l.state = 'pending';
    RETURN QUERY SELECT 'claimed', w, r.attempt + 1, new_fence, extract(epoch FROM submit_within)::double precision,
        NULL, NULL::timestamptz;
END $$;

-- Claims and commits by itself, so that the guard is durable before the provider is called. PostgreSQL refuses it inside
-- a caller's transaction. It has neither SET clause nor SECURITY DEFINER (it couldn't commit), hence the qualified name.
DO $do$ BEGIN EXECUTE format($create$
CREATE PROCEDURE send_claim_commit(key text, feed text, options jsonb,
    INOUT outcome text DEFAULT NULL, INOUT wire_key text DEFAULT NULL, INOUT attempt int DEFAULT NULL,
    INOUT fence bigint DEFAULT NULL, INOUT seconds_left double precision DEFAULT NULL, INOUT reason text DEFAULT NULL,
    INOUT retry_at timestamptz DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT c.* INTO outcome, wire_key, attempt, fence, seconds_left, reason, retry_at
    FROM %I.send_claim(key, feed, options) AS c;
    COMMIT;
END $$
$create$, current_schema()); END $do$;

-- Says that the provider took the message. Stored as testimony first, whatever the row's state is: what a late sender
-- knows is never lost. Outcomes: sent, sent_late, duplicate (another attempt was accepted too), unknown_key.
-- Options: feed (of the attempt, where the row is gone), response (the provider's answer, JSON).
CREATE FUNCTION send_confirm(key text, fence bigint, message_id text, options jsonb) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    w text;
    r send_log;
    ended verdict;
    t timestamptz := clock_timestamp();
    id text := nullif(btrim(message_id, '<> '), '');  -- events name it without the brackets of some answers
BEGIN
    PERFORM send_check_call(key, coalesce(options ->> 'feed', 'unknown'), options, ARRAY['feed', 'response']);
    IF fence IS NULL THEN
        RAISE EXCEPTION 'send_confirm needs the fence that send_claim gave' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(id) > 255 THEN  -- an index entry has a limit, and an answer must never be lost
        id := 'sha256:' || encode(sha256(convert_to(id, 'UTF8')), 'hex');
    END IF;
    w := wire_key(key);
    SELECT * INTO r FROM send_log l WHERE l.wire_key = w;
    IF r.fence IS DISTINCT FROM fence THEN  -- of an earlier attempt: its release remembers what it was
        SELECT * INTO ended FROM verdict v WHERE v.wire_key = w AND v.fence = send_confirm.fence ORDER BY v.id DESC LIMIT 1;
    END IF;
    INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, wire_key, kind, testimony, source, attempt, fence)
    VALUES (coalesce(options ->> 'feed', ended.feed, r.feed, 'unknown'),
        coalesce(id, '~answer:' || fence), 'answer:' || fence,
        event_partition_at(CASE WHEN r.fence = fence THEN r.claimed_at ELSE ended.claimed_at END), t, w, 'sent', 'accepted', 'sender',
        CASE WHEN r.fence = fence THEN r.attempt ELSE ended.attempt END, fence)
    ON CONFLICT DO NOTHING;

    SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'unknown_key', 'no row has this key; the answer is kept as testimony';
        RETURN;
    END IF;
    t := clock_timestamp();
    UPDATE send_log l SET state = 'sent', sent_at = coalesce(l.sent_at, t), answered_at = coalesce(l.answered_at, t),
        provider_message_id = coalesce(l.provider_message_id, id),
        response = coalesce(l.response, options -> 'response'),
        verdict_source = coalesce(CASE WHEN l.state = 'sent' THEN l.verdict_source END, 'sender'),
        verdict_reason = coalesce(CASE WHEN l.state = 'sent' THEN l.verdict_reason END, 'answered'),
        failed_at = NULL, next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL,
        held_reason = NULL, held_since = NULL, updated_at = t
    WHERE l.wire_key = w;
    UPDATE release_outbox o SET cancelled_at = t WHERE o.wire_key = w AND o.delivered_at IS NULL AND o.cancelled_at IS NULL;
    PERFORM send_note_delivery(w);
    IF r.state IN ('pending', 'failed') OR r.state = 'claimed' AND r.fence <> fence THEN
        INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, message_id)
        VALUES (w, r.attempt, fence, 'sent', 'answered late: the row was ' || r.state, 'sender', 'send_confirm', r.feed,
            r.claimed_at, r.submit_by, id);
    END IF;
    IF EXISTS (SELECT FROM provider_event e WHERE e.wire_key = w AND e.source = 'sender' AND e.testimony = 'accepted'
               AND e.fence <> send_confirm.fence) THEN
        RETURN QUERY SELECT 'duplicate', 'another attempt of this send was accepted too';
    ELSIF r.state = 'claimed' AND r.fence = fence OR r.state = 'sent' AND r.fence = fence THEN
        RETURN QUERY SELECT 'sent', NULL;
    ELSE
        RETURN QUERY SELECT 'sent_late', 'the row was ' || r.state;
    END IF;
END $$;

-- The body of send_fail.
CREATE FUNCTION send_fail_guarded(key text, fence bigint, cause text, not_sent boolean) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    w text;
    r send_log;
    t timestamptz;
    why CONSTANT text := coalesce(nullif(cause, ''), 'unspecified');
BEGIN
    PERFORM send_check_isolation();
    PERFORM send_check_call(key, 'unknown', '{}', '{}');
    w := wire_key(key);
    SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;  -- lock
    t := clock_timestamp();
    IF r.state = 'sent' THEN
        RETURN QUERY SELECT 'sent', r.verdict_reason;
        RETURN;
    ELSIF r.state IS DISTINCT FROM 'claimed' OR r.fence IS DISTINCT FROM fence THEN
        RETURN QUERY SELECT 'not_yours', coalesce('the row is ' || r.state || ' at another claim', 'no row has this key');
        RETURN;
    END IF;
    UPDATE send_log l SET cause = why, updated_at = t WHERE l.wire_key = w AND l.state = 'claimed' AND l.fence = r.fence;
    IF send_heard(w, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id) = 'accepted' THEN  -- and look
        RETURN QUERY SELECT * FROM send_settle(r, 'sent', 'accepted', 'feed', 'send_fail', why, t);
    ELSIF not_sent THEN
        RETURN QUERY SELECT * FROM send_free(r, 'not_sent', 'sender', 'send_fail', why, t);
    ELSIF NOT not_sent THEN
        RETURN QUERY SELECT * FROM send_settle(r, 'failed', why, 'sender', 'send_fail', NULL, t);
    ELSE
        RETURN QUERY SELECT 'waiting', why;
    END IF;
END $$;

-- Says how an attempt failed: not_sent false: the provider refused it (failed); true: it never left (released);
-- NULL: can't tell (waiting: it stays claimed, the cause is recorded). Outcomes besides: sent (somebody testified that
-- it was accepted), not_yours (another attempt runs, or none).
-- (In plpgsql an argument and a column of the result can't share the name `reason`, hence the two functions.)
CREATE FUNCTION send_fail(key text, fence bigint, reason text, not_sent boolean) RETURNS TABLE (outcome text, reason text)
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT * FROM send_fail_guarded($1, $2, $3, $4)
$$;
