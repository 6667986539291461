-- Batches and frequency caps: what is capped is left out, and places are locked in one order.

-- As in 0015; what is capped is left out as well, lest it hide the others. It claims a page of them at a time, where
-- they have a cap in the order of their recipients: whoever claims several locks their places in one order.
CREATE OR REPLACE FUNCTION send_claim_released(feed text, batch int, options jsonb)
RETURNS TABLE (outcome text, send_key text, wire_key text, attempt int, fence bigint, seconds_left double precision,
    reason text, retry_at timestamptz, message_class text, recipient text, fingerprint text, payload jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    hold text;
    r send_log;
    c record;
    claimed int := 0;
    looked_at text[] := '{}';
    page int;
BEGIN
    PERFORM send_check_isolation();
    PERFORM send_check_call('none', feed, options, ARRAY['submit_within', 'claimed_by']);
    IF batch IS NULL OR batch NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'batch must lie between 1 and 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    hold := send_hold(feed);
    LOOP
        page := 0;
        -- Rows that would surely be refused are left out, lest they hide the others; what else is refused (it has been
        -- heard of meanwhile) is the next pass's.
        FOR r IN SELECT p.* FROM (
            SELECT l.* FROM send_log l
            WHERE l.feed = send_claim_released.feed AND l.released_at IS NOT NULL AND l.held_reason IS NULL
              AND (l.capped_until IS NULL OR l.capped_until <= t)
              AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
              AND (l.retry_until IS NULL OR l.retry_until > t + coalesce((options ->> 'submit_within')::interval, '60 seconds'))
              AND (hold IS NULL OR hold <> 'suspect' AND l.release_basis IN ('not_sent', 'operator'))
              AND l.wire_key <> ALL (looked_at)
            ORDER BY l.released_at, l.wire_key
            LIMIT batch - claimed
            FOR UPDATE SKIP LOCKED
        ) AS p ORDER BY CASE WHEN (cap_of(p.message_class)).most > 0 THEN lower(p.recipient_key) END NULLS FIRST, p.released_at, p.wire_key
        LOOP
            page := page + 1;
            looked_at := looked_at || r.wire_key;
            -- A same-key retry needs the content that the provider knows: the row's own.
            SELECT * INTO c FROM send_claim(r.send_key, feed, options || jsonb_strip_nulls(jsonb_build_object('fingerprint', r.fingerprint)));
            CONTINUE WHEN c.outcome <> 'claimed';
            claimed := claimed + 1;
            RETURN QUERY SELECT c.outcome, r.send_key, c.wire_key, c.attempt, c.fence, c.seconds_left, c.reason, c.retry_at,
                r.message_class, r.recipient, r.fingerprint, r.payload;
        END LOOP;
        EXIT WHEN page = 0 OR claimed = batch OR cardinality(looked_at) >= batch + 100;
    END LOOP;
END $$;

-- As in 0015, and a batch that came into a deadlock over the recipients' places is claimed once more.
DO $do$ BEGIN EXECUTE format($create$
CREATE OR REPLACE PROCEDURE send_claim_released_commit(feed text, batch int, options jsonb, INOUT claims jsonb DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        SELECT coalesce(jsonb_agg(to_jsonb(c)), '[]') INTO claims FROM %1$I.send_claim_released(feed, batch, options) AS c;
    EXCEPTION WHEN deadlock_detected THEN
        PERFORM pg_sleep(0.1);  -- whoever waited gets it first, or it would happen again
        SELECT coalesce(jsonb_agg(to_jsonb(c)), '[]') INTO claims FROM %1$I.send_claim_released(feed, batch, options) AS c;
    END;
    COMMIT;
END $$
$create$, current_schema()); END $do$;

-- Claims in one statement those of locked rows that need no closer look: never given out, nothing heard of them, no cap,
-- not suppressed, and without a message id by which something might have been heard. The others are send_claim's. Their
-- feed and campaign have no hold; the caller has looked, and keeps the campaign's lock.
CREATE FUNCTION send_claim_untouched(keys text[], claimed_by text, submit_within interval) RETURNS SETOF send_log
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
BEGIN
    RETURN QUERY UPDATE send_log l SET state = 'claimed', attempt = 1, fence = nextval('send_fence'),
        claimed_by = send_claim_untouched.claimed_by, first_claimed_at = t, claimed_at = t, submit_by = t + submit_within,
        next_check_at = t + submit_within, capped_until = NULL, updated_at = t
    WHERE l.wire_key = ANY (keys) AND l.state = 'pending' AND l.attempt = 0
      AND num_nonnulls(l.released_at, l.held_reason, l.provider_message_id, l.known_message_id, l.verdict_reason) = 0
      AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
      AND (cap_of(l.message_class)).most IS NULL
      -- For each row: while the tables have no statistics, the planner would read all of them.
      AND NOT EXISTS (SELECT FROM provider_event e WHERE e.wire_key = l.wire_key OFFSET 0)
      AND NOT EXISTS (SELECT FROM suppression p WHERE p.recipient_key = lower(l.recipient_key) OFFSET 0)
    RETURNING l.*;
END $$;

-- As in 0019, by pages, likewise. Rows besides: `capped` (they count in `batch`, too, and come no more before their
-- time). Where the class has a cap a batch comes in the order of its recipients.
CREATE OR REPLACE FUNCTION send_claim_campaign(campaign text, batch int, options jsonb)
RETURNS TABLE (outcome text, send_key text, wire_key text, attempt int, fence bigint, seconds_left double precision,
    reason text, retry_at timestamptz, message_class text, recipient text, fingerprint text, payload jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    asked record;
    hold text;
    r send_log;
    c record;
    passed_on jsonb;
    submit_within interval;
    keys text[];
    n int;
    given_out int := 0;
    looked_at int := 0;
    place text := coalesce(options ->> 'after', '');
BEGIN
    PERFORM send_check_isolation();
    SELECT k.name, k.feed INTO asked FROM campaign k WHERE k.name = send_claim_campaign.campaign;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no campaign has the name %', coalesce(quote_literal(send_claim_campaign.campaign), 'NULL')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM send_check_call('none', asked.feed, options, ARRAY['submit_within', 'claimed_by', 'after']);
    IF batch IS NULL OR batch NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'batch must lie between 1 and 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    submit_within := send_submit_within(options);
    hold := send_hold(asked.feed);
    IF hold = 'suspect' OR campaign_hold(asked.name, t) IS NOT NULL THEN RETURN; END IF;
    -- As campaign_refusal does for each row: here, so that a pause refuses the batch at once and leaves its rows alone.
    PERFORM FROM campaign k WHERE k.name = asked.name FOR KEY SHARE;
    IF campaign_hold(asked.name, t) IS NOT NULL THEN RETURN; END IF;
    LOOP
        -- Rows that would surely be refused are left out, lest they hide the others.
        keys := ARRAY(SELECT p.wire_key FROM (  -- lock
            SELECT l.wire_key FROM send_log l
            WHERE l.campaign = send_claim_campaign.campaign AND l.state = 'pending' AND l.wire_key > place
              AND l.feed = asked.feed AND l.held_reason IS NULL
              AND (l.capped_until IS NULL OR l.capped_until <= t)
              AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
              AND (l.retry_until IS NULL OR l.retry_until > t + submit_within)
              AND (hold IS NULL OR l.release_basis IS NULL OR l.release_basis IN ('not_sent', 'operator'))
            ORDER BY l.wire_key
            LIMIT batch - given_out
            FOR UPDATE SKIP LOCKED
        ) AS p ORDER BY p.wire_key);
        EXIT WHEN keys = '{}';
        place := keys[cardinality(keys)];
        RETURN QUERY SELECT 'claimed', l.send_key, l.wire_key, l.attempt, l.fence,  -- and look
            extract(epoch FROM submit_within)::double precision, NULL, NULL::timestamptz, l.message_class, l.recipient,
            l.fingerprint, l.payload
            FROM send_claim_untouched(keys, options ->> 'claimed_by', submit_within) AS l;
        GET DIAGNOSTICS n = ROW_COUNT;
        given_out := given_out + n;
        FOR r IN SELECT l.* FROM send_log l WHERE l.wire_key = ANY (keys) AND l.state = 'pending'
            ORDER BY CASE WHEN (cap_of(l.message_class)).most > 0 THEN lower(l.recipient_key) END NULLS FIRST, l.wire_key
        LOOP
            -- A same-key retry needs the content that the provider knows: the row's own.
            passed_on := options - 'after' || jsonb_strip_nulls(jsonb_build_object('fingerprint', r.fingerprint));
            SELECT * INTO c FROM send_claim(r.send_key, asked.feed, passed_on);
            IF c.outcome = 'held' AND c.reason = 'suppressed' THEN  -- nothing was heard of it: the claim has looked
                PERFORM send_settle(l, 'failed', 'suppressed', 'operator', 'send_claim_campaign', NULL, clock_timestamp())
                FROM send_log l WHERE l.wire_key = r.wire_key;
                c.outcome := 'failed';
            END IF;
            CONTINUE WHEN c.outcome NOT IN ('claimed', 'failed', 'capped');
            given_out := given_out + 1;
            RETURN QUERY SELECT c.outcome, r.send_key, c.wire_key, c.attempt, c.fence, c.seconds_left, c.reason, c.retry_at,
                r.message_class, r.recipient, r.fingerprint, r.payload;
        END LOOP;
        looked_at := looked_at + cardinality(keys);
        EXIT WHEN given_out = batch OR looked_at >= batch + 1000;
    END LOOP;
END $$;

-- As in 0019, in the order of the wire keys, and likewise once more.
DO $do$ BEGIN EXECUTE format($create$
CREATE OR REPLACE PROCEDURE send_claim_campaign_commit(campaign text, batch int, options jsonb, INOUT claims jsonb DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        SELECT coalesce(jsonb_agg(to_jsonb(c) ORDER BY c.wire_key), '[]') INTO claims
        FROM %1$I.send_claim_campaign(campaign, batch, options) AS c;
    EXCEPTION WHEN deadlock_detected THEN
        PERFORM pg_sleep(0.1);  -- whoever waited gets it first, or it would happen again
        SELECT coalesce(jsonb_agg(to_jsonb(c) ORDER BY c.wire_key), '[]') INTO claims
        FROM %1$I.send_claim_campaign(campaign, batch, options) AS c;
    END;
    COMMIT;
END $$
$create$, current_schema()); END $do$;
