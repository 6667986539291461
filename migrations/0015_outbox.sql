-- Telling the application. What became of a send is written into the outbox by a trigger, in the transaction that moves
-- its row, whoever does; the daemon delivers it. An entry that the row has overtaken is cancelled in the same place.

ALTER TABLE release_outbox
    ADD COLUMN dead_at timestamptz,             -- given up; a person tells it to try again
    ADD COLUMN leased_until timestamptz,        -- while it is being delivered, by one process
    ADD COLUMN tried_since timestamptz NOT NULL DEFAULT clock_timestamp();
CREATE INDEX release_outbox_due ON release_outbox (next_try_at)
    WHERE delivered_at IS NULL AND cancelled_at IS NULL AND dead_at IS NULL;
CREATE INDEX release_outbox_dead ON release_outbox (dead_at)
    WHERE dead_at IS NOT NULL AND delivered_at IS NULL AND cancelled_at IS NULL;
CREATE INDEX release_outbox_ended ON release_outbox ((coalesce(delivered_at, cancelled_at)))
    WHERE coalesce(delivered_at, cancelled_at) IS NOT NULL;

-- What is written into the outbox: nothing while nobody delivers it. The daemon keeps here what its settings say.
ALTER TABLE installation ADD COLUMN tell text[] NOT NULL DEFAULT '{}'
    CHECK (tell <@ ARRAY['released', 'sent', 'failed', 'held']);

-- What a row stands for now, of the things that can be told. A released row that is held is not given out.
CREATE FUNCTION send_stands_for(r send_log) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN r.state IN ('sent', 'failed') THEN r.state WHEN r.held_reason IS NOT NULL THEN 'held'
        WHEN r.released_at IS NOT NULL THEN 'released' END
$$;

-- Cancels what the row has overtaken, and writes and notifies what is new. A verdict by the running sender's own word is
-- no news, unless it ends a hold or comes late. Told again while the first telling is still under way (or was given up)
-- makes no second entry, so that a key has one at most. The owner's right: senders need none to the outbox.
CREATE FUNCTION send_tell() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    stands CONSTANT text := send_stands_for(NEW);
    news CONSTANT text := CASE
        WHEN stands = 'held' THEN CASE WHEN OLD.held_reason IS DISTINCT FROM NEW.held_reason THEN stands END
        WHEN stands = 'released' OR NEW.state <> OLD.state
             AND (NEW.verdict_source <> 'sender' OR OLD.state <> 'claimed' OR OLD.held_reason IS NOT NULL) THEN stands END;
BEGIN
    UPDATE release_outbox o SET cancelled_at = clock_timestamp()
    WHERE o.wire_key = NEW.wire_key AND o.delivered_at IS NULL AND o.cancelled_at IS NULL
      AND NOT (o.what = 'released' AND stands IS NOT DISTINCT FROM 'released' AND o.fence IS NOT DISTINCT FROM NEW.fence);
    IF news = ANY (SELECT unnest(tell) FROM installation) AND NOT EXISTS (
        SELECT FROM release_outbox o
        WHERE o.wire_key = NEW.wire_key AND o.delivered_at IS NULL AND o.cancelled_at IS NULL
    ) THEN
        INSERT INTO release_outbox (wire_key, what, fence) VALUES (NEW.wire_key, news, NEW.fence);
        PERFORM pg_notify('reconciler_outbox', NEW.wire_key);
    ELSIF news = 'released' THEN
        PERFORM pg_notify('reconciler_outbox', NEW.wire_key);
    END IF;
    RETURN NULL;
END $$;

-- Released, or no longer; told again (the first telling is the release itself, whoever counts it); held, or no longer;
-- decided by anybody but the running sender. Ordinary claims and confirms pay this comparison and no call.
CREATE TRIGGER send_tell AFTER UPDATE OF state, released_at, told, held_reason ON send_log FOR EACH ROW
WHEN (
    OLD.released_at IS DISTINCT FROM NEW.released_at
    OR NEW.released_at IS NOT NULL AND NEW.told > OLD.told AND OLD.told > 0
    OR OLD.held_reason IS DISTINCT FROM NEW.held_reason
    OR NEW.state IN ('sent', 'failed') AND OLD.state <> NEW.state
       AND (NEW.verdict_source <> 'sender' OR OLD.state <> 'claimed')
)
EXECUTE FUNCTION send_tell();

-- As in 0005, without the outbox: the trigger looks after it.
CREATE OR REPLACE FUNCTION send_settle(r send_log, action text, why text, source text, who text, note text, t timestamptz)
RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    UPDATE send_log l SET state = action, sent_at = CASE WHEN action = 'sent' THEN t END,
        failed_at = CASE WHEN action = 'failed' THEN t END, verdict_source = send_settle.source, verdict_reason = why,
        next_check_at = NULL, released_at = NULL, release_basis = NULL, retry_until = NULL, held_reason = NULL,
        held_since = NULL, updated_at = t
    WHERE l.wire_key = r.wire_key AND l.state = r.state AND l.fence IS NOT DISTINCT FROM r.fence;
    PERFORM send_note_delivery(r.wire_key);
    INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by, note)
    VALUES (r.wire_key, r.attempt, r.fence, action, why, source, who, r.feed, r.claimed_at, r.submit_by, note);
    RETURN QUERY SELECT action, why;
END $$;

-- As in 0005, without the outbox.
CREATE OR REPLACE FUNCTION send_confirm(key text, fence bigint, message_id text, options jsonb) RETURNS TABLE (outcome text, reason text)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
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
    ELSIF r.state = 'claimed' AND r.fence = fence OR r.state = 'sent' AND r.fence = fence THEN
        RETURN QUERY SELECT 'sent', NULL;
    ELSE
        RETURN QUERY SELECT 'sent_late', 'the row was ' || r.state;
    END IF;
END $$;

-- Claims up to `batch` released sends of a feed, the oldest first, each through send_claim with all its guards; what that
-- refuses is passed over. Many workers may ask at once and don't wait for each other. Nothing can refuse it inside a
-- transaction, whose rollback would forget claims that were submitted: see send_claim_released_commit. Options:
-- submit_within, claimed_by.
CREATE FUNCTION send_claim_released(feed text, batch int, options jsonb)
RETURNS TABLE (outcome text, send_key text, wire_key text, attempt int, fence bigint, seconds_left double precision,
    reason text, retry_at timestamptz, message_class text, recipient text, fingerprint text, payload jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    hold text;
    c record;
    claimed int := 0;
    -- Rows that would surely be refused are left out, lest they hide the others; what else is refused (it has been heard
    -- of meanwhile) is the next pass's.
    waiting CURSOR FOR SELECT l.* FROM send_log l
        WHERE l.feed = send_claim_released.feed AND l.released_at IS NOT NULL AND l.held_reason IS NULL
          AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
          AND (l.retry_until IS NULL OR l.retry_until > t + coalesce((options ->> 'submit_within')::interval, '60 seconds'))
          AND (hold IS NULL OR hold <> 'suspect' AND l.release_basis IN ('not_sent', 'operator'))
        ORDER BY l.released_at, l.wire_key
        LIMIT batch + 100
        FOR UPDATE SKIP LOCKED;
BEGIN
    PERFORM send_check_isolation();
    PERFORM send_check_call('none', feed, options, ARRAY['submit_within', 'claimed_by']);
    IF batch IS NULL OR batch NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'batch must lie between 1 and 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    hold := send_hold(feed);
    FOR r IN waiting LOOP
        -- A same-key retry needs the content that the provider knows: the row's own.
        SELECT * INTO c FROM send_claim(r.send_key, feed, options || jsonb_strip_nulls(jsonb_build_object('fingerprint', r.fingerprint)));
        CONTINUE WHEN c.outcome <> 'claimed';
        claimed := claimed + 1;
        RETURN QUERY SELECT c.outcome, r.send_key, c.wire_key, c.attempt, c.fence, c.seconds_left, c.reason, c.retry_at,
            r.message_class, r.recipient, r.fingerprint, r.payload;
        EXIT WHEN claimed = batch;  -- here: the next row would be locked by being looked at
    END LOOP;
END $$;

-- The same, committed before it answers: PostgreSQL refuses it inside a caller's transaction. The claims are an array of
-- objects, which have the columns of send_claim_released.
DO $do$ BEGIN EXECUTE format($create$
CREATE PROCEDURE send_claim_released_commit(feed text, batch int, options jsonb, INOUT claims jsonb DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT coalesce(jsonb_agg(to_jsonb(c)), '[]') INTO claims FROM %I.send_claim_released(feed, batch, options) AS c;
    COMMIT;
END $$
$create$, current_schema()); END $do$;
