-- Verdicts name who testified, whoever finds it out; an operator's release waits for a sender who had said that it failed;
-- a send that was enqueued keeps the first fingerprint; an attempt that never left binds to no feed, even after one that
-- may have arrived; and a second attempt is told that its send was sent already.

-- Who spoke: where all who did are of one source, this one, else the feed. The first and the last of them by name.
CREATE FUNCTION testified_by(first text, last text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN first = last AND first IN ('sender', 'look-up') THEN first ELSE 'feed' END
$$;

-- Who said of a send that it was accepted, or rejected (`said`). What bears no key of ours is the feed's.
CREATE FUNCTION send_testified_by(w text, said text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN (SELECT testified_by(min(e.source), max(e.source)) FROM provider_event e WHERE e.wire_key = w AND e.testimony = said);
END $$;

-- As in 0015. `source` feed means: whoever testified.
CREATE OR REPLACE FUNCTION send_settle(r send_log, action text, why text, source text, who text, note text, t timestamptz)
RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    witness CONSTANT text := CASE WHEN source <> 'feed' THEN source
        ELSE send_testified_by(r.wire_key, CASE action WHEN 'sent' THEN 'accepted' ELSE 'rejected' END) END;
BEGIN
    UPDATE send_log l SET state = action, sent_at = CASE WHEN action = 'sent' THEN t END,
        failed_at = CASE WHEN action = 'failed' THEN t END, verdict_source = witness, verdict_reason = why,
        next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL, held_reason = NULL,
        held_since = NULL, updated_at = t
    WHERE l.wire_key = r.wire_key AND l.state = r.state AND l.fence IS NOT DISTINCT FROM r.fence;
    PERFORM send_note_delivery(r.wire_key);
    INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, note)
    VALUES (r.wire_key, r.attempt, r.fence, action, why, witness, who, r.feed, r.claimed_at, r.submit_by, note);
    RETURN QUERY SELECT action, why;
END $$;

-- As in 0006; a sender who had said that the attempt failed may be wrong until submit_by: his client repeats the call by
-- itself, or somebody else has the claim, too.
CREATE OR REPLACE FUNCTION operator_release(key text, note text, who text) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' SET datestyle = 'ISO' AS $$
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
    ELSIF r.submit_by > t THEN
        RETURN QUERY SELECT 'refused', 'its sender may still submit until ' || r.submit_by;
    ELSIF send_hold(r.feed) = 'suspect' THEN
        RETURN QUERY SELECT 'refused', 'the database may have gone back in time, and have forgotten what was heard: resume first';
    ELSE
        RETURN QUERY SELECT * FROM send_free(r, 'operator', 'operator', who, note, t);
    END IF;
END $$;

-- As in 0005; a row that is still pending keeps the first fingerprint that is given. (One that was claimed doesn't: which
-- content was submitted without one, nobody knows.)
CREATE OR REPLACE FUNCTION send_enqueue(key text, feed text, options jsonb) RETURNS TABLE (outcome text, wire_key text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET timezone = 'UTC'
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    w text;
    r record;
BEGIN
    PERFORM send_check_call(key, feed, options, ARRAY['message_class', 'recipient', 'campaign', 'source', 'not_before',
        'expires_at', 'fingerprint', 'payload', 'known_message_id', 'intended_at']);
    w := wire_key(key);
    IF send_insert(w, key, feed, options) THEN
        RETURN QUERY SELECT 'enqueued', w;
        RETURN;
    END IF;
    SELECT l.send_key, l.fingerprint, l.state INTO r FROM send_log l WHERE l.wire_key = w;
    IF r.state = 'pending' AND r.fingerprint IS NULL AND options ->> 'fingerprint' IS NOT NULL
       AND send_is_same(r.send_key, NULL, key, NULL) THEN
        UPDATE send_log l SET fingerprint = options ->> 'fingerprint'
        WHERE l.wire_key = w AND l.state = 'pending' AND l.fingerprint IS NULL;
        SELECT l.send_key, l.fingerprint INTO r FROM send_log l WHERE l.wire_key = w;  -- somebody may have been quicker
    END IF;
    RETURN QUERY SELECT CASE WHEN send_is_same(r.send_key, r.fingerprint, key, options ->> 'fingerprint')
        THEN 'exists' ELSE 'key_reused' END, w;
END $$;

-- As in 0019. A row binds to the feed of the newest attempt that may have been accepted. One on another feed that never
-- left was allowed there, and may be repeated there, too.
CREATE OR REPLACE FUNCTION send_refusal(r send_log, feed text, options jsonb, submit_within interval, t timestamptz)
RETURNS TABLE (outcome text, reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    hold text;
    bound_to text;
    reached CONSTANT boolean := r.attempt > r.not_sent_attempts;
    by_pass CONSTANT boolean := coalesce(r.release_basis IN ('same_key_retry', 'looked_up', 'absent', 'gave_up'), false);
BEGIN
    IF reached AND r.feed <> feed AND NOT r.may_failover THEN
        bound_to := coalesce((SELECT v.feed FROM verdict v
            WHERE v.wire_key = r.wire_key AND v.action = 'released' AND v.reason <> 'not_sent' ORDER BY v.id DESC LIMIT 1), r.feed);
    END IF;
    IF r.expires_at <= t THEN
        RETURN QUERY SELECT 'expired', 'expires_at has passed', NULL::timestamptz;
    ELSIF r.not_before > t THEN
        RETURN QUERY SELECT 'held', 'not_before', r.not_before;
    ELSIF bound_to <> feed THEN
        RETURN QUERY SELECT 'other_feed', 'an attempt on ' || bound_to || ' may have been accepted', NULL::timestamptz;
    ELSIF r.release_basis = 'same_key_retry' AND options ->> 'fingerprint' IS NULL THEN
        RETURN QUERY SELECT 'key_reused', 'a same-key retry needs the fingerprint', NULL::timestamptz;
    ELSIF r.retry_until < t + submit_within THEN
        RETURN QUERY SELECT 'held', 'retry_window_over', NULL::timestamptz;
    ELSE
        IF r.campaign IS NOT NULL THEN
            RETURN QUERY SELECT 'held', c.reason, c.retry_at FROM campaign_refusal(r, t) AS c;
            IF FOUND THEN RETURN; END IF;
        END IF;
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

-- As in 0015; an attempt that was made again, and whose send somebody else had found sent before it was confirmed, is told.
CREATE OR REPLACE FUNCTION send_confirm(key text, fence bigint, message_id text, options jsonb) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    w text;
    r send_log;
    ended verdict;
    t timestamptz := clock_timestamp();
    id text := nullif(btrim(message_id, '<> '), '');  -- events name it without the brackets of some answers
BEGIN
    PERFORM send_check_call(key, coalesce(options ->> 'feed', 'unknown'), options, ARRAY['feed', 'response']);
    IF fence IS NULL OR fence NOT BETWEEN 1 AND 4611686018427387903 THEN  -- fences jump past all that are kept here
        RAISE EXCEPTION 'send_confirm needs the fence that send_claim gave' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF octet_length(id) > 255 THEN  -- an index entry has a limit, and an answer must never be lost
        id := 'sha256:' || encode(sha256(convert_to(id, 'UTF8')), 'hex');
    END IF;
    w := wire_key(key);
    SELECT * INTO r FROM send_log l WHERE l.wire_key = w;
    IF r.fence IS DISTINCT FROM fence THEN  -- of an earlier attempt: its release remembers what it was
        SELECT * INTO ended FROM verdict v WHERE v.wire_key = w AND v.fence = send_confirm.fence ORDER BY v.id DESC LIMIT 1;
    END IF;
    INSERT INTO provider_event (feed, message_id, event_id, partition_at, occurred_at, wire_key, kind, testimony, source, attempt, fence)
    VALUES (coalesce(options ->> 'feed', ended.feed, r.feed, 'unknown'),
        coalesce(id, '~answer:' || fence), 'answer:' || fence,
        event_partition_at(CASE WHEN r.fence = fence THEN r.claimed_at ELSE ended.claimed_at END), t, w, 'sent', 'accepted', 'sender',
        CASE WHEN r.fence = fence THEN r.attempt ELSE ended.attempt END, fence)
    ON CONFLICT DO NOTHING;

    SELECT * INTO r FROM send_log l WHERE l.wire_key = w FOR UPDATE;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'unknown_key', 'no row has this key; the answer is kept as testimony';
        RETURN;
    END IF;
    t := clock_timestamp();
    UPDATE send_log l SET state = 'sent', sent_at = coalesce(l.sent_at, t), answered_at = coalesce(l.answered_at, t),
        provider_message_id = coalesce(l.provider_message_id, id),
        response = coalesce(l.response, options -> 'response'),
        verdict_source = coalesce(CASE WHEN l.state = 'sent' THEN l.verdict_source END, 'sender'),
        verdict_reason = coalesce(CASE WHEN l.state = 'sent' THEN l.verdict_reason END, 'answered'),
        failed_at = NULL, next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL,
        held_reason = NULL, held_since = NULL, updated_at = t
    WHERE l.wire_key = w;
    PERFORM send_note_delivery(w);
    IF r.state IN ('pending', 'failed') OR r.state = 'claimed' AND r.fence <> fence THEN
        INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, message_id)
        VALUES (w, r.attempt, fence, 'sent', 'answered late: the row was ' || r.state, 'sender', 'send_confirm', r.feed,
            r.claimed_at, r.submit_by, id);
    END IF;
    IF EXISTS (SELECT FROM provider_event e WHERE e.wire_key = w AND e.source = 'sender' AND e.testimony = 'accepted'
               AND e.fence <> send_confirm.fence) THEN
        RETURN QUERY SELECT 'duplicate', 'another attempt of this send was accepted too';
    ELSIF r.state IN ('claimed', 'sent') AND r.fence = fence THEN
        RETURN QUERY SELECT 'sent', CASE
            WHEN r.state = 'sent' AND r.verdict_source <> 'sender' AND r.attempt > r.not_sent_attempts + 1
            THEN 'it was sent already (' || r.verdict_source || '): an earlier attempt may have been accepted' END;
    ELSE
        RETURN QUERY SELECT 'sent_late', 'the row was ' || r.state;
    END IF;
END $$;

-- As in 0028.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus') THEN
        ALTER FUNCTION send_confirm(text, bigint, text, jsonb) SET plan_cache_mode = force_generic_plan;
        ALTER FUNCTION send_enqueue(text, text, jsonb) SET plan_cache_mode = force_generic_plan;
    END IF;
END $$;
