-- What prunes delete of distributed tables.

-- Feeds of sends that were claimed.
CREATE OR REPLACE FUNCTION citus_feeds() RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    found text := (SELECT min(l.feed) FROM send_log l WHERE l.claimed_at IS NOT NULL);
BEGIN
    WHILE found IS NOT NULL LOOP
        RETURN NEXT found;
        found := (SELECT min(l.feed) FROM send_log l WHERE l.claimed_at IS NOT NULL AND l.feed > found);
    END LOOP;
END $$;

-- Deletes sends that are over, with what belongs to them. See DELETE_SENDS.
CREATE OR REPLACE FUNCTION citus_delete_sends(keys text[], over timestamptz, ambiguous_over timestamptz)
RETURNS TABLE (send_log bigint, verdict bigint, shadow_verdict bigint, look_up bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    gone text[];
    asked CONSTANT text[] := ARRAY(SELECT a.wire_key FROM asked_again a WHERE a.wire_key = ANY (keys) AND a.asked_at >= over);
BEGIN
    gone := ARRAY(SELECT p.wire_key FROM send_lock(ARRAY(SELECT k FROM unnest(keys) AS k ORDER BY k)) AS p
        WHERE send_is_over(p, over, ambiguous_over) AND p.wire_key <> ALL (asked));
    DELETE FROM asked_again a WHERE a.wire_key = ANY (gone);
    DELETE FROM send_log l WHERE l.wire_key = ANY (gone);
    GET DIAGNOSTICS send_log = ROW_COUNT;
    DELETE FROM verdict v WHERE v.wire_key = ANY (gone);
    GET DIAGNOSTICS verdict = ROW_COUNT;
    DELETE FROM shadow_verdict v WHERE v.wire_key = ANY (gone);
    GET DIAGNOSTICS shadow_verdict = ROW_COUNT;
    DELETE FROM look_up u WHERE u.wire_key = ANY (gone);
    GET DIAGNOSTICS look_up = ROW_COUNT;
    RETURN NEXT;
END $$;

-- Deletes pending rows that were never given out and that nobody asks for, of those named.
CREATE OR REPLACE FUNCTION citus_delete_pending(keys text[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    gone text[];
    n bigint;
BEGIN
    gone := ARRAY(SELECT p.wire_key FROM send_lock(ARRAY(SELECT k FROM unnest(keys) AS k ORDER BY k)) AS p
        WHERE p.state = 'pending' AND p.attempt = 0 AND p.next_check_at IS NULL);
    DELETE FROM send_log l WHERE l.wire_key = ANY (gone)
        AND NOT EXISTS (SELECT 1 FROM provider_event e WHERE e.wire_key = l.wire_key);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- See DELETE_CANCELLED.
CREATE OR REPLACE FUNCTION citus_delete_cancelled(cut timestamptz, most bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    name text;
    n bigint := 0;
BEGIN
    FOR name IN SELECT c.name FROM campaign c WHERE c.state = 'cancelled' AND c.updated_at < cut LOOP
        n := n + citus_delete_pending(ARRAY(SELECT l.wire_key FROM send_log l
            WHERE l.campaign = name AND l.state = 'pending' AND l.attempt = 0 AND l.next_check_at IS NULL
              AND NOT EXISTS (SELECT 1 FROM provider_event e WHERE e.wire_key = l.wire_key)
            ORDER BY l.wire_key LIMIT most - n));
        EXIT WHEN n >= most;
    END LOOP;
    RETURN n;
END $$;

-- Deletes events without a time that no send may still need. At most
-- ten thousand a run. See DELETE_UNDATED.
CREATE OR REPLACE FUNCTION citus_delete_undated(cut timestamptz, late_window interval) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    failed_since CONSTANT timestamptz := clock_timestamp() - late_window;
    e record;
    n bigint := 0;
BEGIN
    FOR e IN SELECT p.* FROM provider_event p
        WHERE p.partition_at = '1970-01-01 00:00:00+00' AND p.received_at < cut
          AND NOT EXISTS (SELECT 1 FROM send_log l WHERE l.wire_key = p.wire_key
                          AND (l.state IN ('pending', 'claimed') OR l.failed_at > failed_since))
        ORDER BY p.received_at LIMIT 10000
    LOOP
        CONTINUE WHEN e.wire_key LIKE '~%' AND EXISTS (SELECT 1 FROM send_log l
            WHERE l.feed = e.feed AND (l.provider_message_id = e.message_id OR l.known_message_id = e.message_id)
              AND (l.state IN ('pending', 'claimed') OR l.failed_at > failed_since));
        DELETE FROM provider_event p WHERE p.wire_key = e.wire_key AND p.message_id = e.message_id
            AND p.event_id = e.event_id AND p.feed = e.feed AND p.partition_at = e.partition_at;
        n := n + 1;
    END LOOP;
    RETURN n;
END $$;

-- Forgets duplicates whose sends are gone. See DELETE_DUPLICATES.
CREATE OR REPLACE FUNCTION citus_delete_duplicates(cut timestamptz, most bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    keys text[] := ARRAY(SELECT d.wire_key FROM duplicate d WHERE d.found_at < cut);
    kept text[];
    n bigint;
BEGIN
    kept := ARRAY(SELECT l.wire_key FROM send_log l WHERE l.wire_key = ANY (keys));
    DELETE FROM duplicate d WHERE (d.wire_key, d.sort) IN (
        SELECT o.wire_key, o.sort FROM duplicate o WHERE o.found_at < cut AND o.wire_key <> ALL (kept) LIMIT most);
    GET DIAGNOSTICS n = ROW_COUNT;
    RETURN n;
END $$;

-- Forgets places of which none counts any more. See DELETE_PLACES.
CREATE OR REPLACE FUNCTION citus_delete_places(cut timestamptz, most bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
DECLARE
    h record;
    c frequency_cap;
    n bigint := 0;
BEGIN
    FOR h IN SELECT k.recipient_key, k.message_class, k.taken_at[1] AS newest FROM cap_taken k WHERE k.taken_at[1] < cut LIMIT most LOOP
        SELECT * INTO c FROM frequency_cap f WHERE f.message_class = h.message_class;
        CONTINUE WHEN FOUND AND h.newest > cap_since(c, clock_timestamp());
        DELETE FROM cap_taken k WHERE k.recipient_key = h.recipient_key AND k.message_class = h.message_class AND k.taken_at[1] < cut;
        n := n + 1;
    END LOOP;
    RETURN n;
END $$;
