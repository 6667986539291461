-- Old rows go. What may be deleted is said here once, and months of events are dropped by the owner's right, since
-- whoever prunes may delete rows and no tables.

ALTER TABLE installation
    ADD COLUMN pruned_until timestamptz,        -- sends that ended before it may be gone; it never goes back
    ADD COLUMN pruned_at timestamptz,           -- when a prune last came to its end
    ADD COLUMN prune_left jsonb NOT NULL DEFAULT '[]';  -- the months of events that it had to leave, and why

-- Says whether a send may be deleted: it is final, and ended before `over`. Ambiguous ones teach what silence is worth,
-- so they stay as long as the events that say when they were heard of: until `ambiguous_over`.
CREATE FUNCTION send_is_over(r send_log, over timestamptz, ambiguous_over timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT r.state IN ('sent', 'failed') AND coalesce(r.sent_at, r.failed_at) < CASE
        WHEN r.claimed_at IS NOT NULL AND r.attempt - r.not_sent_attempts > (r.answered_at IS NOT NULL)::int
             AND (r.state <> 'failed' OR r.verdict_source <> 'sender')
        THEN least(over, ambiguous_over) ELSE over END
$$;

-- The wire key of a send that may still need a month of events, or NULL. A send that was given out and is not decided,
-- or failed within `late_window`, needs every month since its first claim: what was said of it, and of its neighbours,
-- by which silence is judged. One that was never given out needs what a month holds about it. Providers' clocks may be
-- a day off.
CREATE FUNCTION provider_event_holder(month date, late_window interval) RETURNS text
LANGUAGE sql STABLE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
    SELECT wire_key FROM (
        SELECT l.wire_key, l.first_claimed_at AS since FROM send_log l
        WHERE l.state IN ('pending', 'claimed') AND l.next_check_at IS NOT NULL
          AND l.first_claimed_at < month + interval '1 month 1 day'
        UNION ALL
        SELECT l.wire_key, coalesce(l.first_claimed_at, l.created_at) FROM send_log l
        WHERE l.state = 'failed' AND l.failed_at > statement_timestamp() - late_window
          AND coalesce(l.first_claimed_at, l.created_at) < month + interval '1 month 1 day'
        UNION ALL
        SELECT l.wire_key, l.created_at FROM send_log l
        WHERE l.state = 'pending' AND (l.first_claimed_at IS NULL OR l.next_check_at IS NULL)
          AND EXISTS (SELECT FROM provider_event e WHERE e.wire_key = l.wire_key
                      AND e.partition_at >= month AND e.partition_at < month + interval '1 month')
    ) AS needs
    ORDER BY since, wire_key LIMIT 1
$$;

-- Drops a month of events. Answers `dropped`; `gone`: it has no partition; `busy`: somebody's transaction is in the way,
-- try again; or the wire key of a send that may still need it, after `held:`. Whoever writes or reads events waits
-- behind the lock while this waits for it, so that is 50 ms at most. The owner's right; asked for by someone who may
-- delete events anyway.
CREATE FUNCTION provider_event_drop_month(month date, late_window interval) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
DECLARE
    holder text;
BEGIN
    IF NOT has_table_privilege(session_user, 'provider_event', 'DELETE') THEN
        RAISE EXCEPTION 'dropping events needs the right to delete them' USING ERRCODE = 'insufficient_privilege';
    ELSIF month + interval '1 month' > clock_timestamp() - interval '30 days' THEN
        RAISE EXCEPTION 'a month of events is kept for 30 days at least' USING ERRCODE = 'invalid_parameter_value';
    ELSIF month NOT IN (SELECT provider_event_months()) THEN
        RETURN 'gone';
    END IF;
    holder := provider_event_holder(month, late_window);
    IF holder IS NOT NULL THEN
        RETURN 'held:' || holder;
    END IF;
    PERFORM set_config('lock_timeout', '50', true);
    BEGIN
        LOCK TABLE ONLY provider_event IN ACCESS EXCLUSIVE MODE;
        EXECUTE format('DROP TABLE IF EXISTS %I', 'provider_event_' || to_char(month, 'YYYYMM'));
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        RETURN 'busy';
    END;
    RETURN 'dropped';
END $$;

-- As in 0005, and a row that was forgotten (its send key may hold an address) bears its wire key instead: it is still the
-- same send for whoever has the key.
CREATE OR REPLACE FUNCTION send_is_same(row_key text, row_fingerprint text, key text, fingerprint text) RETURNS boolean
LANGUAGE sql STABLE SET search_path FROM CURRENT AS $$
    SELECT (row_key = key OR row_key = wire_key(key) AND EXISTS (
            SELECT FROM send_log l WHERE l.wire_key = row_key
               AND (l.recipient_key LIKE '~forgotten:%' OR l.recipient = '~forgotten')))
        AND (row_fingerprint IS NULL OR fingerprint IS NULL OR row_fingerprint = fingerprint)
$$;
