-- The operator's verbs, by the same law: lock first, look afterwards.

-- Gives a claimed or failed row free for another attempt. Passes a pause; refused before submit_by and where anything was
-- heard of the send. Outcomes: released, sent (it turned out to be accepted), refused, unknown_key.
CREATE FUNCTION operator_release(key text, note text, who text) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    w CONSTANT text := wire_key(key);
    r send_log;
    heard text;
    t timestamptz;
BEGIN
    PERFORM send_check_isolation();
    SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;
    t := clock_timestamp();
    heard := send_heard(w, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id);
    IF r.wire_key IS NULL THEN
        RETURN QUERY SELECT 'unknown_key', 'no row has this key';
    ELSIF r.state = 'sent' THEN
        RETURN QUERY SELECT 'refused', 'it was sent';
    ELSIF heard = 'accepted' THEN
        RETURN QUERY SELECT * FROM operator_settle(r, 'sent', 'accepted', 'feed', note, who, t);
    ELSIF heard IS NOT NULL THEN
        RETURN QUERY SELECT 'refused', 'a provider spoke of it (' || heard || '): see why';
    ELSIF r.state = 'pending' THEN
        RETURN QUERY SELECT 'refused', 'it is free to be claimed already';
    ELSIF r.state = 'claimed' AND r.submit_by > t THEN
        RETURN QUERY SELECT 'refused', 'its sender may still submit until ' || r.submit_by;
    ELSE
        UPDATE send_log l SET state = 'pending', released_at = t, release_basis = 'operator', retry_until = NULL, next_check_at = t, failed_at = NULL,
            verdict_source = NULL, verdict_reason = NULL, held_reason = NULL, held_since = NULL, told = 0, updated_at = t
        WHERE l.wire_key = w AND l.state = r.state AND l.fence IS NOT DISTINCT FROM r.fence;
        INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, note)
        VALUES (w, r.attempt, r.fence, 'released', 'operator', 'operator', who, r.feed, r.claimed_at, r.submit_by, note);
        RETURN QUERY SELECT 'released', 'operator';
    END IF;
END $$;

-- Says that a send was sent (action sent) or that it never will be (action failed). Acceptance heard of turns a failure
-- into sent; a sent row stays so. Outcomes: sent, failed, refused, unknown_key.
CREATE FUNCTION operator_decide(key text, action text, note text, who text) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    w CONSTANT text := wire_key(key);
    r send_log;
    t timestamptz;
BEGIN
    PERFORM send_check_isolation();
    IF action NOT IN ('sent', 'failed') THEN
        RAISE EXCEPTION 'action must be sent or failed' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;
    t := clock_timestamp();
    IF r.wire_key IS NULL THEN
        RETURN QUERY SELECT 'unknown_key', 'no row has this key';
    ELSIF r.state = 'sent' THEN
        RETURN QUERY SELECT 'refused', 'it was sent already';
    ELSIF send_heard(w, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id) = 'accepted' THEN
        RETURN QUERY SELECT * FROM operator_settle(r, 'sent', 'accepted', 'feed', note, who, t);
    ELSIF action = 'failed' AND r.state = 'failed' THEN
        RETURN QUERY SELECT 'refused', 'it failed already';
    ELSIF action = 'failed' AND r.state = 'claimed' AND r.submit_by > t THEN
        RETURN QUERY SELECT 'refused', 'its sender may still submit until ' || r.submit_by;
    ELSE
        RETURN QUERY SELECT * FROM operator_settle(r, action, 'operator', 'operator', note, who, t);
    END IF;
END $$;

-- Writes a final state of a locked row, and its verdict.
CREATE FUNCTION operator_settle(r send_log, action text, why text, source text, note text, who text, t timestamptz)
RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE send_log l SET state = operator_settle.action, sent_at = CASE WHEN action = 'sent' THEN t END,
        failed_at = CASE WHEN action = 'failed' THEN t END, verdict_source = operator_settle.source, verdict_reason = why,
        next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL, held_reason = NULL,
        held_since = NULL, updated_at = t
    WHERE l.wire_key = r.wire_key AND l.state = r.state AND l.fence IS NOT DISTINCT FROM r.fence;
    PERFORM send_note_delivery(r.wire_key);
    INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, note)
    VALUES (r.wire_key, r.attempt, r.fence, action, why, source, who, r.feed, r.claimed_at, r.submit_by, note);
    UPDATE release_outbox o SET cancelled_at = t WHERE o.wire_key = r.wire_key AND o.delivered_at IS NULL AND o.cancelled_at IS NULL;
    RETURN QUERY SELECT action, why;
END $$;
