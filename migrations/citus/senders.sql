-- What of the senders' protocol must be said in another way where the tables are distributed with Citus: laid over the
-- functions of the numbered files by `reconciler migrate --citus`, and again after each later migration. The laws and
-- contracts are the same. Citus hands a statement to the node that has the key it names; it locks rows of one named key
-- only, knows the row type `send_log` here and not in the shards, and joins on the wire key alone.

-- As in 0004: the row is read first, and judged here. (Citus 14.0 dies of an element of an array in a SET clause.)
CREATE OR REPLACE FUNCTION send_note_delivery(w text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
DECLARE
    r send_log;
    best float8[];
    name text;
    at timestamptz;
BEGIN
    SELECT * INTO r FROM send_log l WHERE l.wire_key = w;
    best := send_outcome(r);
    name := delivery_name(best[1]::int);
    at := to_timestamp(best[2]);
    IF best[1] > 0 THEN
        UPDATE send_log l SET delivery = name, delivery_at = at
        WHERE l.wire_key = w AND l.state = 'sent';
    END IF;
END $$;

-- As in 0021, in steps: an event without our key lies on its own node, and whose message id it bears is asked of all.
CREATE OR REPLACE FUNCTION send_heard(w text, f text, recipient_key text, provider_message_id text, known_message_id text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    heard text[] := ARRAY(SELECT testimony FROM provider_event WHERE wire_key = w);
    via text[];
    feed text;
    id text;
    stand_in text;
    e record;
BEGIN
    IF num_nonnulls($4, $5) > 0 THEN
        via := ARRAY(SELECT v.feed FROM verdict v WHERE v.wire_key = w AND v.action = 'released' AND v.feed IS NOT NULL);
        FOR feed, id IN SELECT DISTINCT v, i FROM unnest($2 || via) AS v, unnest(ARRAY[$4, $5]) AS i WHERE i IS NOT NULL LOOP
            stand_in := stand_in_key(feed, id);
            FOR e IN SELECT p.testimony, p.recipient FROM provider_event p WHERE p.wire_key = stand_in LOOP
                CONTINUE WHEN e.recipient <> $3 OR send_shares_id(w, feed, id, e.recipient);
                heard := heard || e.testimony;
            END LOOP;
        END LOOP;
    END IF;
    RETURN CASE WHEN 'accepted' = ANY (heard) THEN 'accepted'
                WHEN 'rejected' = ANY (heard) THEN 'rejected'
                WHEN cardinality(heard) > 0 THEN 'none' END;
END $$;

-- Locks those of these rows that nobody has locked, one after the other, and returns them.
CREATE OR REPLACE FUNCTION send_lock(keys text[]) RETURNS SETOF send_log
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    key text;
BEGIN
    FOREACH key IN ARRAY keys LOOP
        RETURN QUERY SELECT * FROM send_log l WHERE l.wire_key = key FOR UPDATE SKIP LOCKED;
    END LOOP;
END $$;

-- As in 0021: the sends that have a place are read first.
CREATE OR REPLACE FUNCTION cap_take(r send_log, c frequency_cap) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    address CONSTANT text := lower(r.recipient_key);
    had cap_taken;
    keys text[];
    times timestamptz[];
    gone text[] := '{}';
    s send_log;
    t timestamptz;
BEGIN
    SELECT * INTO had FROM cap_taken h WHERE h.recipient_key = address AND h.message_class = c.message_class FOR UPDATE;  -- lock
    IF NOT FOUND THEN
        INSERT INTO cap_taken AS h (recipient_key, message_class) VALUES (address, c.message_class)
        ON CONFLICT (recipient_key, message_class) DO UPDATE SET message_class = h.message_class
        RETURNING h.* INTO had;
    END IF;
    t := clock_timestamp();
    FOR s IN SELECT * FROM send_log l WHERE l.wire_key = ANY (had.wire_keys) LOOP  -- and look: newer than the lock
        IF send_reached_nobody(s) THEN gone := gone || s.wire_key; END IF;
    END LOOP;
    SELECT coalesce(array_agg(s.k ORDER BY s.at DESC, s.k), '{}'), coalesce(array_agg(s.at ORDER BY s.at DESC, s.k), '{}')
    INTO keys, times
    FROM unnest(had.wire_keys, had.taken_at) AS s(k, at)
    WHERE s.at > cap_since(c, t) AND s.k <> r.wire_key AND s.k <> ALL (gone);
    IF cardinality(keys) >= c.most THEN
        RETURN coalesce(times[c.most] + c.span, cap_end(c, t));
    END IF;
    UPDATE cap_taken h SET wire_keys = r.wire_key || keys, taken_at = t || times
    WHERE h.recipient_key = address AND h.message_class = c.message_class;
    RETURN NULL;
END $$;

-- As in 0014, with the time made beforehand.
CREATE OR REPLACE FUNCTION send_note_asked_again(w text, why text, t timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    lately CONSTANT timestamptz := t - interval '1 minute';
BEGIN
    IF EXISTS (SELECT 1 FROM asked_again a WHERE a.wire_key = w AND a.asked_at > lately) THEN
        RETURN;
    END IF;
    PERFORM FROM send_log l WHERE l.wire_key = w FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        INSERT INTO asked_again AS a (wire_key, first_at, asked_at, asked_as) VALUES (w, t, t, why)
        ON CONFLICT (wire_key) DO UPDATE SET n = a.n + 1, asked_at = t, asked_as = why WHERE a.asked_at <= lately;
    END IF;
END $$;

-- Where 0028 ran before this was distributed: Citus can't plan without the values.
ALTER FUNCTION send_claim(text, text, jsonb) RESET plan_cache_mode;
ALTER FUNCTION send_confirm(text, bigint, text, jsonb) RESET plan_cache_mode;
ALTER FUNCTION send_fail(text, bigint, text, boolean) RESET plan_cache_mode;
ALTER FUNCTION send_enqueue(text, text, jsonb) RESET plan_cache_mode;
