-- As in 0021; whoever waited looks once more: what has been heard meanwhile, and what the time, a hold or a suppression now
-- forbids, was true before the claim was given. A claim under a cap locks its recipient's places for it, and waits for
-- whoever has them; any other waited where it took long. Locks are taken in the order that they had.
CREATE OR REPLACE FUNCTION send_objection(r send_log, heard text, feed text, options jsonb, submit_within interval, t timestamptz,
    OUT outcome text, OUT reason text, OUT retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    address CONSTANT text := lower(r.recipient_key);
    cap frequency_cap;
BEGIN
    FOR look IN 1..2 LOOP
        IF heard = 'accepted' THEN
            outcome := 'already_sent';
            reason := 'accepted';
        ELSIF heard IS NOT NULL THEN
            outcome := 'held';
            reason := CASE heard WHEN 'rejected' THEN 'rejected' ELSE 'unknown_event' END;
        ELSIF r.attempt = 0 AND r.intended_at < r.created_at - (SELECT memory FROM installation) THEN
            outcome := 'beyond_memory';
            reason := 'the job was older than the guard''s memory when it was enqueued';
        ELSE
            SELECT * INTO outcome, reason, retry_at FROM send_refusal(r, feed, options, submit_within, t);
        END IF;
        IF outcome IS NOT NULL THEN
            IF look = 2 AND cap.message_class IS NOT NULL THEN  -- a row without a place would be kept for ever
                DELETE FROM cap_taken h
                WHERE h.recipient_key = address AND h.message_class = cap.message_class AND h.wire_keys = '{}';
            END IF;
            RETURN;
        END IF;
        EXIT WHEN look = 2;
        cap := cap_of(r.message_class);
        IF cap.message_class IS NULL THEN
            IF clock_timestamp() < t + interval '0.1 s' THEN RETURN; END IF;  -- it waited for nobody
        ELSIF r.recipient_key IS NULL AND r.state = 'claimed' THEN
            RAISE EXCEPTION 'message class % has a frequency cap: claim its sends with one recipient each', quote_literal(r.message_class)
                USING ERRCODE = 'invalid_parameter_value';
        ELSIF r.recipient_key IS NULL THEN  -- it was there before the cap was
            outcome := 'held';
            reason := 'cap_needs_recipient';
            RETURN;
        ELSE
            PERFORM FROM cap_taken h WHERE h.recipient_key = address AND h.message_class = cap.message_class FOR UPDATE;  -- lock
            IF NOT FOUND THEN
                INSERT INTO cap_taken AS h (recipient_key, message_class) VALUES (address, cap.message_class)
                ON CONFLICT (recipient_key, message_class) DO UPDATE SET message_class = h.message_class;
            END IF;
        END IF;
        heard := send_heard(r.wire_key, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id);  -- and look
        t := clock_timestamp();
    END LOOP;
    IF cap.message_class IS NULL THEN RETURN; END IF;
    retry_at := cap_take(r, cap);
    IF retry_at IS NOT NULL THEN
        outcome := 'capped';
        reason := 'frequency_cap';
    END IF;
END $$;
