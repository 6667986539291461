-- What passes write and ask on distributed tables.

-- What is heard of sends through their message ids; those of which nothing is are missing.
CREATE OR REPLACE FUNCTION citus_said_by_id(keys text[]) RETURNS TABLE (wire_key text, said text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    r send_log;
BEGIN
    FOR r IN SELECT * FROM send_log l WHERE l.wire_key = ANY (keys) AND num_nonnulls(l.provider_message_id, l.known_message_id) > 0 LOOP
        wire_key := r.wire_key;
        said := send_heard(r.wire_key, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id);
        IF said IS NOT NULL THEN RETURN NEXT; END IF;
    END LOOP;
END $$;

-- Settles a page of claimed and released rows by evidence. See SETTLE_WATCHED.
CREATE OR REPLACE FUNCTION citus_settle_watched(after_at timestamptz, after_key text, of_feed text, of_key text, pass_id bigint,
    by text, live text[], only_live boolean)
RETURNS TABLE (sent bigint, failed bigint, at timestamptz, wire_key text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    keys text[] := '{}';
    states text[] := '{}';
    fences bigint[] := '{}';
    heard text[] := '{}';
    told text[] := '{}';
    r record;
BEGIN
    FOR r IN SELECT l.wire_key, l.next_check_at, l.state, l.fence FROM send_log l
        WHERE l.state IN ('pending', 'claimed') AND l.next_check_at IS NOT NULL
          AND (l.next_check_at, l.wire_key) > (after_at, after_key)
          AND (of_feed IS NULL OR l.feed = of_feed) AND (of_key IS NULL OR l.wire_key = of_key)
          AND (l.feed = ANY (live)) = only_live
        ORDER BY l.next_check_at, l.wire_key LIMIT 5000
    LOOP
        keys := keys || r.wire_key;
        states := states || r.state;
        fences := fences || r.fence;
        at := r.next_check_at;
        wire_key := r.wire_key;
    END LOOP;
    IF keys = '{}' THEN RETURN; END IF;
    FOR r IN SELECT * FROM citus_said_by_id(keys) LOOP
        heard := heard || r.wire_key;
        told := told || r.said;
    END LOOP;
    sent := 0;
    failed := 0;
    FOR r IN
        WITH said AS MATERIALIZED (
            SELECT wire_key, bool_or(testimony = 'accepted') AS accepted, bool_or(testimony = 'rejected') AS rejected,
                   min(message_id) FILTER (WHERE testimony = 'accepted' AND message_id NOT LIKE '~%') AS message_id,
                   max(ARRAY[delivery_rank(kind), extract(epoch FROM coalesce(occurred_at, received_at))]::float8[]) AS best,
                   min(reason) FILTER (WHERE testimony = 'rejected') AS words,
                   min(source) FILTER (WHERE testimony = 'accepted') AS first_accepting,
                   max(source) FILTER (WHERE testimony = 'accepted') AS last_accepting,
                   min(source) FILTER (WHERE testimony = 'rejected') AS first_rejecting,
                   max(source) FILTER (WHERE testimony = 'rejected') AS last_rejecting
            FROM provider_event WHERE wire_key = ANY (keys) GROUP BY wire_key
        ), found AS MATERIALIZED (
            SELECT p.wire_key, p.state AS state_then, p.fence AS fence_then, e.message_id, e.words, coalesce(e.best, '{0}') AS best,
                   CASE WHEN e.accepted THEN testified_by(e.first_accepting, e.last_accepting)
                        WHEN i.said = 'accepted' THEN 'feed'
                        ELSE testified_by(e.first_rejecting, e.last_rejecting) END AS source,
                   coalesce(e.accepted, false) OR i.said IS NOT DISTINCT FROM 'accepted' AS accepted,
                   coalesce(e.rejected, false) OR i.said IS NOT DISTINCT FROM 'rejected' AS rejected
            FROM unnest(keys, states, fences) AS p(wire_key, state, fence)
            LEFT JOIN said e ON e.wire_key = p.wire_key
            LEFT JOIN unnest(heard, told) AS i(wire_key, said) ON i.wire_key = p.wire_key
        ), moved AS (
            UPDATE send_log s SET
                state = CASE WHEN h.accepted THEN 'sent' ELSE 'failed' END,
                sent_at = CASE WHEN h.accepted THEN t END, failed_at = CASE WHEN NOT h.accepted THEN t END,
                verdict_source = h.source, verdict_reason = CASE WHEN h.accepted THEN 'accepted' ELSE 'rejected' END,
                provider_message_id = coalesce(s.provider_message_id, h.message_id),
                delivery = delivery_name(h.best[1]::int),
                delivery_at = CASE WHEN h.best[1] > 0 THEN to_timestamp(h.best[2]) END,
                next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL,
                held_reason = NULL, held_since = NULL, updated_at = t
            FROM found h
            WHERE s.wire_key = h.wire_key AND s.state = h.state_then AND s.fence IS NOT DISTINCT FROM h.fence_then
              AND (h.accepted OR h.rejected AND (s.state = 'pending' OR s.attempt - s.not_sent_attempts <= 1))
            RETURNING s.wire_key, s.attempt, s.fence, s.state, s.verdict_reason, s.verdict_source, s.feed, s.claimed_at,
                      s.submit_by, s.provider_message_id, CASE WHEN NOT h.accepted THEN h.words END AS words
        )
        INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, feed, claimed_at, submit_by, message_id, note)
        SELECT wire_key, attempt, fence, pass_id, state, verdict_reason, verdict_source, by, feed, claimed_at, submit_by,
               provider_message_id, words
        FROM moved
        RETURNING action
    LOOP
        sent := sent + (r.action = 'sent')::int;
        failed := failed + (r.action = 'failed')::int;
    END LOOP;
    RETURN NEXT;
END $$;

-- Turns a page of failed rows into sent ones. See SETTLE_FAILED.
CREATE OR REPLACE FUNCTION citus_settle_failed(after_at timestamptz, after_key text, of_feed text, of_key text, pass_id bigint,
    by text, live text[], only_live boolean)
RETURNS TABLE (sent bigint, failed bigint, at timestamptz, wire_key text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    t timestamptz;
    keys text[] := '{}';
    by_id text[];
    best float8[];
    name text;
    told_at timestamptz;
    witness text;
    r send_log;
BEGIN
    sent := 0;
    failed := 0;
    FOR r IN SELECT * FROM send_log l
        WHERE l.state = 'failed' AND (l.failed_at, l.wire_key) > (after_at, after_key)
          AND (of_feed IS NULL OR l.feed = of_feed) AND (of_key IS NULL OR l.wire_key = of_key)
          AND (l.feed = ANY (live)) = only_live
        ORDER BY l.failed_at, l.wire_key LIMIT 2000
    LOOP
        keys := keys || r.wire_key;
        at := r.failed_at;
        wire_key := r.wire_key;
    END LOOP;
    IF keys = '{}' THEN RETURN; END IF;
    by_id := ARRAY(SELECT s.wire_key FROM citus_said_by_id(keys) AS s WHERE s.said = 'accepted');
    keys := by_id || ARRAY(SELECT e.wire_key FROM provider_event e WHERE e.wire_key = ANY (keys) AND e.testimony = 'accepted');
    FOR r IN SELECT * FROM send_log l WHERE l.wire_key = ANY (keys) AND l.state = 'failed' ORDER BY l.wire_key LOOP
        t := clock_timestamp();
        best := send_outcome(r);
        name := delivery_name(best[1]::int);
        told_at := CASE WHEN best[1] > 0 THEN to_timestamp(best[2]) END;
        witness := send_testified_by(r.wire_key, 'accepted');
        UPDATE send_log l SET state = 'sent', sent_at = t, failed_at = NULL,
            verdict_source = witness, verdict_reason = 'accepted',
            delivery = name, delivery_at = told_at, updated_at = t
        WHERE l.wire_key = r.wire_key AND l.state = 'failed' AND l.failed_at = r.failed_at;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO verdict (wire_key, attempt, fence, pass, action, reason, source, who, feed, claimed_at, submit_by, message_id, note)
        VALUES (r.wire_key, r.attempt, r.fence, pass_id, 'sent', 'accepted', witness, by,
            r.feed, r.claimed_at, r.submit_by, r.provider_message_id, 'late evidence: the row had failed');
        sent := sent + 1;
    END LOOP;
    RETURN NEXT;
END $$;

-- Brings deliveries up to date with the events that were stored between two times; returns how many changed. See FOLLOW.
CREATE OR REPLACE FUNCTION citus_follow(since timestamptz, upto timestamptz) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    feeds text[] := '{}';
    ids text[] := '{}';
    recipients text[] := '{}';
    keys text[];
    ranks int[] := '{}';
    times timestamptz[] := '{}';
    moved text[] := '{}';
    best float8[];
    r send_log;
    x record;
    changed bigint;
BEGIN
    IF NOT EXISTS (SELECT 1 FROM provider_event e WHERE e.received_at > since AND e.received_at <= upto) THEN
        RETURN 0;
    END IF;
    keys := ARRAY(
        SELECT l.wire_key FROM provider_event e JOIN send_log l ON l.wire_key = e.wire_key
        WHERE e.received_at > since AND e.received_at <= upto AND e.source <> 'sender' AND delivery_rank(e.kind) > 0
          AND l.state = 'sent' AND ARRAY[delivery_rank(e.kind), extract(epoch FROM coalesce(e.occurred_at, e.received_at))]::float8[]
              > ARRAY[delivery_rank(l.delivery), extract(epoch FROM l.delivery_at)]::float8[]);
    FOR x IN SELECT p.feed, p.message_id, p.recipient FROM provider_event p
        WHERE p.received_at > since AND p.received_at <= upto AND p.source <> 'sender' AND delivery_rank(p.kind) > 0
          AND p.wire_key LIKE '~%'
    LOOP
        feeds := feeds || x.feed;
        ids := ids || x.message_id;
        recipients := recipients || x.recipient;
    END LOOP;
    IF ids <> '{}' THEN
        keys := keys || ARRAY(SELECT l.wire_key FROM send_log l JOIN unnest(feeds, ids, recipients) AS e(feed, id, recipient)
                ON l.feed = e.feed AND l.provider_message_id = e.id
            WHERE l.state = 'sent' AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient))
            || ARRAY(SELECT l.wire_key FROM send_log l JOIN unnest(feeds, ids, recipients) AS e(feed, id, recipient)
                ON l.feed = e.feed AND l.known_message_id = e.id
            WHERE l.state = 'sent' AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient));
    END IF;
    FOR r IN SELECT * FROM send_log l WHERE l.wire_key = ANY (keys) AND l.state = 'sent' LOOP
        best := send_outcome(r);
        CONTINUE WHEN best[1] IS NULL OR best[1] = 0
            OR (r.delivery, r.delivery_at) IS NOT DISTINCT FROM (delivery_name(best[1]::int), to_timestamp(best[2]));
        moved := moved || r.wire_key;
        ranks := ranks || best[1]::int;
        times := times || to_timestamp(best[2]);
    END LOOP;
    UPDATE send_log l SET delivery = delivery_name(v.rank), delivery_at = v.at, updated_at = t
    FROM unnest(moved, ranks, times) AS v(key, rank, at) WHERE l.wire_key = v.key AND l.state = 'sent';
    GET DIAGNOSTICS changed = ROW_COUNT;
    RETURN changed;
END $$;

-- Takes places in a feed's budget of questions. See RESERVE.
CREATE OR REPLACE FUNCTION citus_reserve(of_feed text, by text, keys text[], lasts bigint[], budget int)
RETURNS TABLE (id bigint, wire_key text, asked_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    a record;
    left_over int := budget;
BEGIN
    IF look_up_rest(of_feed) IS NOT NULL THEN RETURN; END IF;
    left_over := budget - (SELECT count(*) FROM look_up l
        WHERE l.feed = of_feed AND l.asked_at > statement_timestamp() - interval '1 minute');
    FOR a IN SELECT * FROM unnest(keys, lasts) AS a(key, last) ORDER BY a.key LOOP
        EXIT WHEN left_over <= 0;
        CONTINUE WHEN EXISTS (SELECT 1 FROM look_up l WHERE l.wire_key = a.key AND l.feed = of_feed AND l.id > a.last);
        RETURN QUERY INSERT INTO look_up (wire_key, feed, who) VALUES (a.key, of_feed, by)
            RETURNING look_up.id, look_up.wire_key, look_up.asked_at;
        left_over := left_over - 1;
    END LOOP;
END $$;

-- What there is to ask about sends: a row for each feed with an attempt out. See QUESTIONS.
CREATE OR REPLACE FUNCTION citus_questions(keys text[])
RETURNS TABLE (wire_key text, feed text, own boolean, message_class text, state text, recipient text, salt bytea,
    claimed_at timestamptz, submit_by timestamptz, known_message_id text, id bigint, asked_at timestamptz, answer text,
    reason text, now timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    s send_log;
    feeds text[];
BEGIN
    now := clock_timestamp();
    FOR s IN SELECT * FROM send_log l WHERE l.wire_key = ANY (keys) ORDER BY l.wire_key LOOP
        feeds := ARRAY(SELECT v.feed FROM verdict v WHERE v.wire_key = s.wire_key AND v.action = 'released'
            AND v.reason <> 'not_sent' AND v.feed IS NOT NULL);
        FOR feed IN SELECT DISTINCT f FROM unnest(s.feed || feeds) AS f ORDER BY f LOOP
            wire_key := s.wire_key;
            own := feed = s.feed;
            message_class := s.message_class;
            state := s.state;
            recipient := s.recipient;
            claimed_at := coalesce(s.first_claimed_at, s.created_at);
            submit_by := coalesce(s.submit_by, s.first_claimed_at, s.created_at);
            known_message_id := CASE WHEN own THEN s.known_message_id END;
            SELECT l.id, l.asked_at, l.answer, l.reason INTO id, asked_at, answer, reason FROM look_up l
            WHERE l.wire_key = s.wire_key AND l.feed = citus_questions.feed ORDER BY l.id DESC LIMIT 1;
            RETURN NEXT;
        END LOOP;
    END LOOP;
END $$;

-- The next answered send of the same feed and class that is found by the same means. See CONTROLS.
CREATE OR REPLACE FUNCTION citus_next_control(of_key text, of_feed text, of_class text, since timestamptz, found_by text)
RETURNS TABLE (wire_key text, recipient text, salt bytea, claimed_at timestamptz, submit_by timestamptz, known_message_id text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    s send_log;
BEGIN
    FOR s IN SELECT * FROM send_log l
        WHERE l.answered_at IS NOT NULL AND l.attempt = 1 AND (l.recipient IS NULL OR l.recipient_key IS NOT NULL)
          AND l.feed = of_feed AND l.message_class = of_class AND l.first_claimed_at >= since AND l.wire_key <> of_key
        ORDER BY l.first_claimed_at LIMIT 100
    LOOP
        CONTINUE WHEN found_by = 'recipient' AND s.recipient IS NULL OR found_by = 'id' AND s.known_message_id IS NULL
            OR found_by IS NULL OR found_by NOT IN ('key', 'recipient', 'id');
        RETURN QUERY SELECT s.wire_key, s.recipient, NULL::bytea, s.claimed_at, coalesce(s.submit_by, s.answered_at), s.known_message_id;
        RETURN;
    END LOOP;
END $$;

-- Lifts what a cap refused where the cap has changed since. See LIFT.
CREATE OR REPLACE FUNCTION citus_lift_caps() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    class text;
    changed timestamptz;
    keys text[];
    n bigint;
    lifted bigint := 0;
BEGIN
    FOR class IN SELECT DISTINCT l.message_class FROM send_log l WHERE l.state = 'pending' AND l.capped_until > t LOOP
        changed := coalesce((cap_of(class)).changed_at, 'infinity');
        keys := ARRAY(SELECT c.wire_key FROM send_log c
            WHERE c.message_class = class AND c.state = 'pending' AND c.capped_until > t AND c.updated_at < changed
            ORDER BY c.wire_key LIMIT 1000 - lifted);
        keys := ARRAY(SELECT p.wire_key FROM send_lock(keys) AS p);
        UPDATE send_log l SET capped_until = NULL, updated_at = t,
            next_check_at = CASE WHEN l.released_at IS NULL THEN l.next_check_at ELSE t END
        WHERE l.wire_key = ANY (keys) AND l.state = 'pending' AND l.capped_until IS NOT NULL;
        GET DIAGNOSTICS n = ROW_COUNT;
        lifted := lifted + n;
        EXIT WHEN lifted >= 1000;
    END LOOP;
    RETURN lifted;
END $$;

-- The row of a send or wire key. `how`: read, lock, or lock where nobody has (else an error).
CREATE OR REPLACE FUNCTION citus_row(key text, how text DEFAULT 'read') RETURNS SETOF send_log
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    w CONSTANT text := wire_key(key);
BEGIN
    IF how = 'read' THEN
        RETURN QUERY SELECT * FROM send_log l WHERE l.wire_key = w;
    ELSIF how = 'lock' THEN
        RETURN QUERY SELECT * FROM send_log l WHERE l.wire_key = w FOR UPDATE;
    ELSE
        RETURN QUERY SELECT * FROM send_log l WHERE l.wire_key = w FOR UPDATE NOWAIT;
    END IF;
END $$;

-- The highest fence that anything remembers. See KEEP_HIGHEST_FENCE.
CREATE OR REPLACE FUNCTION citus_highest_fence(since timestamptz) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN greatest(
        (SELECT max(l.fence) FROM send_log l),
        (SELECT max(v.fence) FROM verdict v),
        (SELECT max(e.fence) FROM provider_event e
         WHERE e.received_at > since AND e.source = 'sender' AND e.fence < 4611686018427387904));
END $$;
