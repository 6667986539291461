-- How silence is measured on distributed tables. Citus joins on the wire key alone and gives a row of one
-- table no bounded sample of another: so samples are taken here, each by a statement of its own, from all nodes at once.

-- Controls of a class that were submitted after one time and up to another, the newest or the oldest of them.
CREATE OR REPLACE FUNCTION citus_controls(of_feed text, of_class text, after timestamptz, upto timestamptz, most bigint, newest boolean)
RETURNS TABLE (wire_key text, first_claimed_at timestamptz, domain text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    IF newest THEN
        RETURN QUERY SELECT c.wire_key, c.first_claimed_at, c.domain FROM control c
            WHERE c.feed = of_feed AND c.message_class = of_class AND c.first_claimed_at > after AND c.first_claimed_at <= upto
            ORDER BY c.first_claimed_at DESC LIMIT most;
    ELSE
        RETURN QUERY SELECT c.wire_key, c.first_claimed_at, c.domain FROM control c
            WHERE c.feed = of_feed AND c.message_class = of_class AND c.first_claimed_at > after AND c.first_claimed_at <= upto
            ORDER BY c.first_claimed_at LIMIT most;
    END IF;
END $$;

-- When sends of a feed were claimed, likewise.
CREATE OR REPLACE FUNCTION citus_claims(of_feed text, after timestamptz, upto timestamptz, most bigint, newest boolean)
RETURNS SETOF timestamptz
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    IF newest THEN
        RETURN QUERY SELECT l.claimed_at FROM send_log l WHERE l.feed = of_feed AND l.claimed_at > after AND l.claimed_at <= upto
            ORDER BY l.claimed_at DESC LIMIT most;
    ELSE
        RETURN QUERY SELECT l.claimed_at FROM send_log l WHERE l.feed = of_feed AND l.claimed_at > after AND l.claimed_at <= upto
            ORDER BY l.claimed_at LIMIT most;
    END IF;
END $$;

-- When ambiguous sends of a feed were claimed, of those whose time was over.
CREATE OR REPLACE FUNCTION citus_ambiguous(of_feed text, after timestamptz, upto timestamptz, over_by timestamptz)
RETURNS SETOF timestamptz
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY SELECT a.claimed_at FROM ambiguous a
        WHERE a.feed = of_feed AND a.claimed_at > after AND a.claimed_at <= upto AND a.submit_by < over_by
        ORDER BY a.claimed_at;
END $$;

-- When a feed first spoke of sends, of those that it spoke of.
CREATE OR REPLACE FUNCTION citus_heard(keys text[], of_feed text, since timestamptz, upto timestamptz)
RETURNS TABLE (wire_key text, at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT e.wire_key, min(e.received_at) FROM feed_event e
        WHERE e.wire_key = ANY (keys) AND e.feed = of_feed AND e.received_at <= upto
          AND (e.partition_at >= since OR e.partition_at = '1970-01-01 00:00:00+00')
        GROUP BY e.wire_key;
END $$;

-- A feed's message classes that have controls since then, by the newest of each.
CREATE OR REPLACE FUNCTION citus_classes(of_feed text, since timestamptz) RETURNS TABLE (message_class text, newest timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_variable
BEGIN
    message_class := (SELECT min(c.message_class) FROM control c WHERE c.feed = of_feed);
    WHILE message_class IS NOT NULL LOOP
        newest := (SELECT max(c.first_claimed_at) FROM control c WHERE c.feed = of_feed AND c.message_class = message_class);
        IF newest > since THEN RETURN NEXT; END IF;
        message_class := (SELECT min(c.message_class) FROM control c WHERE c.feed = of_feed AND c.message_class > message_class);
    END LOOP;
END $$;

-- Sends that a provider proved accepted, the last proved first.
CREATE OR REPLACE FUNCTION citus_proved(of_feed text, after timestamptz, upto timestamptz, most bigint)
RETURNS TABLE (wire_key text, message_class text, claimed_at timestamptz, submit_by timestamptz, reached int, domain text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT l.wire_key, l.message_class, l.claimed_at, l.submit_by, l.attempt - l.not_sent_attempts,
            recipient_domain(l.recipient_key)
        FROM send_log l
        WHERE l.feed = of_feed AND l.state = 'sent' AND l.answered_at IS NULL AND l.verdict_source IN ('feed', 'look-up')
          AND l.sent_at > after AND l.sent_at <= upto
        ORDER BY l.sent_at DESC LIMIT most;
END $$;

-- Which of these sends had a neighbourhood that was found ill.
CREATE OR REPLACE FUNCTION citus_ill(keys text[]) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY SELECT v.wire_key FROM verdict v WHERE v.wire_key = ANY (keys) AND (v.inputs ->> 'ill')::boolean;
END $$;

-- Sends of a feed that silence released and that were then accepted twice.
CREATE OR REPLACE FUNCTION citus_duplicated(of_feed text, since timestamptz, upto timestamptz)
RETURNS TABLE (message_class text, first_claimed_at timestamptz, domain text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    keys CONSTANT text[] := ARRAY(SELECT d.wire_key FROM duplicate d
        WHERE d.feed = of_feed AND d.sort = 'duplicate' AND d.found_at BETWEEN since AND upto);
BEGIN
    RETURN QUERY SELECT l.message_class, l.first_claimed_at, recipient_domain(l.recipient_key) FROM send_log l
        WHERE l.wire_key = ANY (keys) AND EXISTS (SELECT 1 FROM verdict v WHERE v.wire_key = l.wire_key
            AND v.action = 'released' AND v.reason IN ('absent', 'looked_up'));
END $$;

-- Ambiguous sends of a feed, the newest first, with what the last verdict that was based on figures said of them.
CREATE OR REPLACE FUNCTION citus_causes(of_feed text, before timestamptz, most bigint)
RETURNS TABLE (reported boolean, accepted boolean, risk double precision)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    s record;
    keys text[] := '{}';
    causes boolean[] := '{}';
    proved boolean[] := '{}';
    judged text[] := '{}';
    risks float8[] := '{}';
    words boolean[] := '{}';
BEGIN
    FOR s IN SELECT a.wire_key, a.cause, a.state, a.verdict_source FROM ambiguous a
        WHERE a.feed = of_feed AND a.claimed_at < before ORDER BY a.claimed_at DESC LIMIT most
    LOOP
        CONTINUE WHEN s.state = 'failed' AND s.verdict_source IN ('feed', 'look-up') OR s.verdict_source = 'operator';
        keys := keys || s.wire_key;
        causes := causes || (s.cause IS NOT NULL);
        proved := proved || coalesce(s.state = 'sent' AND s.verdict_source IN ('feed', 'look-up'), false);
    END LOOP;
    FOR s IN SELECT DISTINCT ON (v.wire_key) v.wire_key, coalesce(v.risk, (v.inputs ->> 'risk')::float8) AS risk,
            (v.inputs ->> 'reported')::boolean AS reported
        FROM verdict v WHERE v.wire_key = ANY (keys) AND v.action IN ('released', 'held') AND v.inputs IS NOT NULL
        ORDER BY v.wire_key, v.id DESC
    LOOP
        judged := judged || s.wire_key;
        risks := risks || s.risk;
        words := words || s.reported;
    END LOOP;
    RETURN QUERY SELECT coalesce(j.reported, k.cause),
            k.proved OR EXISTS (SELECT 1 FROM duplicate d WHERE d.wire_key = k.wire_key AND d.sort = 'duplicate'), j.risk
        FROM unnest(keys, causes, proved) AS k(wire_key, cause, proved)
        LEFT JOIN unnest(judged, risks, words) AS j(wire_key, risk, reported) USING (wire_key);
END $$;

-- When something was released on a feed that may duplicate, since then.
CREATE OR REPLACE FUNCTION citus_released(of_feed text, since timestamptz) RETURNS SETOF timestamptz
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY SELECT v.decided_at FROM verdict v
        WHERE v.feed = of_feed AND v.action = 'released' AND v.reason IN ('absent', 'looked_up', 'gave_up') AND v.decided_at > since;
END $$;

-- Such releases, the newest first, and whether they turned out wrong.
CREATE OR REPLACE FUNCTION citus_releases(of_feed text, after timestamptz, upto timestamptz, most bigint)
RETURNS TABLE (n bigint, wrong boolean)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    r record;
BEGIN
    n := 0;
    FOR r IN SELECT v.wire_key, s.state = 'sent' AND s.attempt = v.attempt AS accepted
        FROM verdict v JOIN send_log s ON s.wire_key = v.wire_key
        WHERE v.feed = of_feed AND v.action = 'released' AND v.reason IN ('absent', 'looked_up', 'gave_up')
          AND v.decided_at > after AND v.decided_at <= upto
        ORDER BY v.decided_at DESC LIMIT most
    LOOP
        n := n + 1;
        wrong := r.accepted OR EXISTS (SELECT 1 FROM duplicate d WHERE d.wire_key = r.wire_key AND d.sort = 'duplicate');
        RETURN NEXT;
    END LOOP;
END $$;
