-- What people are shown of distributed tables.

-- Who proved sends of a feed accepted, of the last thousand.
CREATE OR REPLACE FUNCTION citus_proved_by(of_feed text, since timestamptz) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY SELECT p.verdict_source FROM send_log p
        WHERE p.feed = of_feed AND p.state = 'sent' AND p.answered_at IS NULL AND p.verdict_source IN ('feed', 'look-up')
          AND p.sent_at > since
        ORDER BY p.sent_at DESC LIMIT 1000;
END $$;

-- Keys of answered sends of a feed.
CREATE OR REPLACE FUNCTION citus_answered(of_feed text, after timestamptz, before timestamptz, most int) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
BEGIN
    RETURN QUERY SELECT c.wire_key FROM send_log c
        WHERE c.feed = of_feed AND c.answered_at IS NOT NULL AND c.attempt = 1 AND c.claimed_at > after AND c.claimed_at < before
        ORDER BY c.claimed_at LIMIT most;
END $$;

-- Events with a key of the last day, and how many of them name no send. See FOREIGN.
CREATE OR REPLACE FUNCTION citus_foreign(t timestamptz, of_feed text) RETURNS TABLE (feed text, keyed bigint, unknown bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT e.feed, count(*), count(*) FILTER (WHERE e.nobody)
        FROM (SELECT p.feed, s.wire_key IS NULL AS nobody
              FROM provider_event p LEFT JOIN send_log s ON s.wire_key = p.wire_key
              WHERE p.partition_at > t - interval '2 days' AND p.received_at > t - interval '1 day'
                AND p.wire_key NOT LIKE '~%' AND p.source IN ('http', 'sqs') AND (of_feed IS NULL OR p.feed = of_feed)
              ORDER BY p.received_at DESC LIMIT 20000) AS e
        GROUP BY e.feed;
END $$;

-- A sample of answered sends, and whether anything was ever heard of each. See VANISHED.
CREATE OR REPLACE FUNCTION citus_sample(feeds text[], untils timestamptz[], since timestamptz, parts int, most int)
RETURNS TABLE (wire_key text, feed text, message_class text, claimed_at timestamptz, heard int)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    asked record;
    s send_log;
    sends send_log[] := '{}';
    by_key text[];
BEGIN
    FOR asked IN SELECT a.feed, since + (a.until - since) * (part - 1) / parts AS after, since + (a.until - since) * part / parts AS upto
        FROM unnest(feeds, untils) AS a(feed, until) CROSS JOIN generate_series(1, parts) AS part
    LOOP
        FOR s IN SELECT * FROM send_log l
            WHERE l.feed = asked.feed AND l.answered_at IS NOT NULL AND l.attempt = 1
              AND (l.recipient IS NULL OR l.recipient_key IS NOT NULL) AND l.claimed_at > asked.after AND l.claimed_at <= asked.upto
            ORDER BY l.claimed_at DESC LIMIT most
        LOOP
            sends := sends || s;
        END LOOP;
    END LOOP;
    by_key := ARRAY(SELECT x.wire_key FROM unnest(sends) AS x);
    by_key := ARRAY(SELECT DISTINCT e.wire_key FROM feed_event e WHERE e.wire_key = ANY (by_key));
    FOREACH s IN ARRAY sends LOOP
        wire_key := s.wire_key;
        feed := s.feed;
        message_class := s.message_class;
        claimed_at := s.claimed_at;
        heard := (s.wire_key = ANY (by_key))::int;
        IF heard = 0 AND num_nonnulls(s.provider_message_id, s.known_message_id) > 0 THEN
            heard := citus_heard_by_id(ARRAY[stand_in_key(s.feed, s.provider_message_id), stand_in_key(s.feed, s.known_message_id)],
                s.recipient_key)::int;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- Whether an event without our key fits.
CREATE OR REPLACE FUNCTION citus_heard_by_id(stand_ins text[], about text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    keys CONSTANT text[] := array_remove(stand_ins, NULL);
BEGIN
    RETURN EXISTS (SELECT 1 FROM provider_event e
        WHERE e.wire_key = ANY (keys) AND (e.recipient IS NULL OR about IS NULL OR e.recipient = about));
END $$;
