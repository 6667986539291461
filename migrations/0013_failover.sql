-- After a fail-over evidence counts from any feed, and a hold of any: two functions of 0004 and 0005 looked at one only.

-- Where attempts went to several feeds an event without our key is joined through each of them. As before it counts
-- where its message id and recipient fit this send and no other.
CREATE OR REPLACE FUNCTION send_heard(w text, f text, recipient_key text, provider_message_id text, known_message_id text) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN bool_or(said = 'accepted') THEN 'accepted'
                WHEN bool_or(said = 'rejected') THEN 'rejected'
                WHEN count(*) > 0 THEN 'none' END
    FROM (
        SELECT testimony AS said FROM provider_event WHERE wire_key = $1
        UNION ALL
        SELECT e.testimony
        FROM (SELECT $2 AS feed UNION
              SELECT v.feed FROM verdict v WHERE v.wire_key = $1 AND v.action = 'released' AND v.feed IS NOT NULL) AS via
        CROSS JOIN (VALUES ($4), ($5)) AS known(id)
        JOIN provider_event e ON e.wire_key = stand_in_key(via.feed, known.id)
        WHERE NOT EXISTS (
            SELECT FROM send_log l
            WHERE l.feed = via.feed AND (l.provider_message_id = known.id OR l.known_message_id = known.id)
              AND l.wire_key <> $1
              AND (e.recipient IS NULL OR l.recipient_key IS NULL OR l.recipient_key = e.recipient))
          AND (e.recipient IS NULL OR $3 IS NULL OR e.recipient = $3)
    ) AS heard
$$;

-- Why a pending row may not be given out now, apart from testimony: (outcome, reason, when to ask again), or no row.
CREATE OR REPLACE FUNCTION send_refusal(r send_log, feed text, options jsonb, submit_within interval, t timestamptz)
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
        -- A feed that may have gone back in time gives out nothing; pause and breaker stop what a pass released, on the
        -- feed that it was released on and on the one it goes to. Whoever pauses waits for the lock: once `pause` has
        -- returned, nothing that a pass released is given out. Those whom a hold refuses anyway don't take it, they
        -- would keep `pause` waiting.
        hold := coalesce(send_hold(feed), CASE WHEN by_pass THEN send_hold(r.feed) END);
        IF hold IS NULL AND by_pass THEN
            PERFORM FROM feed_state s WHERE s.feed = '*' FOR KEY SHARE;
            hold := coalesce(send_hold(feed), send_hold(r.feed));
        END IF;
        IF hold = 'suspect' OR hold IS NOT NULL AND by_pass THEN
            RETURN QUERY SELECT 'held', hold, NULL::timestamptz;
        END IF;
    END IF;
END $$;
