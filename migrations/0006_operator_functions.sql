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
        RETURN QUERY SELECT 'refused', 'it was sent already';
    ELSIF heard = 'accepted' THEN
        RETURN QUERY SELECT * FROM send_settle(r, 'sent', 'accepted', 'feed', who, note, t);
    ELSIF heard IS NOT NULL THEN
        RETURN QUERY SELECT 'refused', 'a provider spoke of it (' || heard || '): see why';
    ELSIF r.state = 'pending' THEN
        RETURN QUERY SELECT 'refused', 'it is free to be claimed already';
    ELSIF r.state = 'claimed' AND r.submit_by > t THEN
        RETURN QUERY SELECT 'refused', 'its sender may still submit until ' || r.submit_by;
    ELSE
        RETURN QUERY SELECT * FROM send_free(r, 'operator', 'operator', who, note, t);
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
        RETURN QUERY SELECT * FROM send_settle(r, 'sent', 'accepted', 'feed', who, note, t);
    ELSIF action = 'failed' AND r.state = 'failed' THEN
        RETURN QUERY SELECT 'refused', 'it failed already';
    ELSIF action = 'failed' AND r.state = 'claimed' AND r.submit_by > t THEN
        RETURN QUERY SELECT 'refused', 'its sender may still submit until ' || r.submit_by;
    ELSE
        RETURN QUERY SELECT * FROM send_settle(r, action, 'operator', 'operator', who, note, t);
    END IF;
END $$;
