-- Batches of sends from distributed tables, and how their campaigns stand.

-- As in 0019, in steps.
CREATE OR REPLACE FUNCTION campaign_hold(campaign text, t timestamptz) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    c campaign;
BEGIN
    SELECT * INTO c FROM campaign k WHERE k.name = $1;
    IF c.state <> 'active' THEN
        RETURN c.state;
    ELSIF c.name IS NOT NULL AND c.loaded_at IS NULL THEN
        RETURN 'loading';
    ELSIF c.starts_at > t THEN
        RETURN 'scheduled';
    ELSIF c.confirmed_at IS NULL AND c.starts_at < t - c.max_lateness THEN
        IF NOT EXISTS (SELECT 1 FROM send_log l WHERE l.campaign = $1 AND l.state IN ('claimed', 'sent')) THEN
            RETURN 'late';
        END IF;
    END IF;
    RETURN NULL;
END $$;

-- As in 0019, in steps.
CREATE OR REPLACE FUNCTION campaign_standing(campaign text) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    hold CONSTANT text := campaign_hold($1, clock_timestamp());
BEGIN
    IF hold IS NOT NULL OR NOT EXISTS (SELECT 1 FROM campaign c WHERE c.name = $1) THEN
        RETURN hold;
    ELSIF EXISTS (SELECT 1 FROM campaign_load f WHERE f.campaign = $1 AND f.ended_at IS NULL) THEN
        RETURN 'active';
    ELSIF EXISTS (SELECT 1 FROM send_log l WHERE l.campaign = $1 AND l.state IN ('pending', 'claimed')) THEN
        RETURN 'active';
    END IF;
    RETURN 'finished';
END $$;

-- As in 0022: candidates are read first, and then locked one by one.
CREATE OR REPLACE FUNCTION send_claim_released(feed text, batch int, options jsonb)
RETURNS TABLE (outcome text, send_key text, wire_key text, attempt int, fence bigint, seconds_left double precision,
    reason text, retry_at timestamptz, message_class text, recipient text, fingerprint text, payload jsonb)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET timezone = 'UTC'
SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    submit_within CONSTANT interval := coalesce((options ->> 'submit_within')::interval, '60 seconds');
    hold text;
    keys text[];
    r send_log;
    c record;
    claimed int := 0;
    looked_at text[] := '{}';
BEGIN
    PERFORM send_check_isolation();
    PERFORM send_check_call('none', feed, options, ARRAY['submit_within', 'claimed_by']);
    IF batch IS NULL OR batch NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'batch must lie between 1 and 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    hold := send_hold(feed);
    LOOP
        -- Rows that would surely be refused are left out, lest they hide the others; what else is refused (it has been
        -- heard of meanwhile) is the next pass's.
        keys := ARRAY(
            SELECT l.wire_key FROM send_log l
            WHERE l.feed = send_claim_released.feed AND l.released_at IS NOT NULL AND l.held_reason IS NULL
              AND (l.capped_until IS NULL OR l.capped_until <= t)
              AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
              AND (l.retry_until IS NULL OR l.retry_until > t + submit_within)
              AND (hold IS NULL OR hold <> 'suspect' AND l.release_basis IN ('not_sent', 'operator'))
              AND l.wire_key <> ALL (looked_at)
            ORDER BY l.released_at, l.wire_key
            LIMIT batch - claimed);
        EXIT WHEN keys = '{}';
        looked_at := looked_at || keys;
        FOR r IN SELECT p.* FROM send_lock(keys) AS p WHERE p.released_at IS NOT NULL
            ORDER BY CASE WHEN (cap_of(p.message_class)).most > 0 THEN lower(p.recipient_key) END NULLS FIRST, p.released_at, p.wire_key
        LOOP
            -- A same-key retry needs the content that the provider knows: the row's own.
            SELECT * INTO c FROM send_claim(r.send_key, feed, options || jsonb_strip_nulls(jsonb_build_object('fingerprint', r.fingerprint)));
            CONTINUE WHEN c.outcome <> 'claimed';
            claimed := claimed + 1;
            RETURN QUERY SELECT c.outcome, r.send_key, c.wire_key, c.attempt, c.fence, c.seconds_left, c.reason, c.retry_at,
                r.message_class, r.recipient, r.fingerprint, r.payload;
        END LOOP;
        EXIT WHEN claimed = batch OR cardinality(looked_at) >= batch + 1000;
    END LOOP;
END $$;

-- As in 0022; the caller has left out whom a cap or a suppression concerns.
CREATE OR REPLACE FUNCTION send_claim_untouched(keys text[], claimed_by text, submit_within interval) RETURNS SETOF send_log
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    until CONSTANT timestamptz := t + submit_within;
    fences CONSTANT bigint[] := ARRAY(SELECT nextval('send_fence') FROM unnest(keys));
BEGIN
    RETURN QUERY UPDATE send_log l SET state = 'claimed', attempt = 1, fence = v.fence,
        claimed_by = send_claim_untouched.claimed_by, first_claimed_at = t, claimed_at = t, submit_by = until,
        next_check_at = until, capped_until = NULL, updated_at = t
    FROM unnest(keys, fences) AS v(key, fence)
    WHERE l.wire_key = v.key AND l.state = 'pending' AND l.attempt = 0
      AND num_nonnulls(l.released_at, l.held_reason, l.provider_message_id, l.known_message_id, l.verdict_reason) = 0
      AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
      AND NOT EXISTS (SELECT 1 FROM provider_event e WHERE e.wire_key = l.wire_key)
    RETURNING l.*;
END $$;

-- As in 0022: candidates are read first, and then locked one by one.
CREATE OR REPLACE FUNCTION send_claim_campaign(campaign text, batch int, options jsonb)
RETURNS TABLE (outcome text, send_key text, wire_key text, attempt int, fence bigint, seconds_left double precision,
    reason text, retry_at timestamptz, message_class text, recipient text, fingerprint text, payload jsonb)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT SET timezone = 'UTC'
SET enable_seqscan = off SET jit = off AS $$
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
    rows send_log[];
    untouched text[];
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
        keys := ARRAY(
            SELECT l.wire_key FROM send_log l
            WHERE l.campaign = send_claim_campaign.campaign AND l.state = 'pending' AND l.wire_key > place
              AND l.feed = asked.feed AND l.held_reason IS NULL
              AND (l.capped_until IS NULL OR l.capped_until <= t)
              AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
              AND (l.retry_until IS NULL OR l.retry_until > t + submit_within)
              AND (hold IS NULL OR l.release_basis IS NULL OR l.release_basis IN ('not_sent', 'operator'))
            ORDER BY l.wire_key
            LIMIT batch - given_out);
        EXIT WHEN keys = '{}';
        place := keys[cardinality(keys)];
        rows := ARRAY(SELECT p FROM send_lock(keys) AS p WHERE p.state = 'pending');  -- lock
        untouched := ARRAY(SELECT p.wire_key FROM unnest(rows) AS p
            WHERE (cap_of(p.message_class)).most IS NULL
              AND NOT EXISTS (SELECT 1 FROM suppression s WHERE s.recipient_key = lower(p.recipient_key)));
        keys := ARRAY(SELECT p.wire_key FROM unnest(rows) AS p);
        RETURN QUERY SELECT 'claimed', l.send_key, l.wire_key, l.attempt, l.fence,  -- and look
            extract(epoch FROM submit_within)::double precision, NULL, NULL::timestamptz, l.message_class, l.recipient,
            l.fingerprint, l.payload
            FROM send_claim_untouched(untouched, options ->> 'claimed_by', submit_within) AS l;
        GET DIAGNOSTICS n = ROW_COUNT;
        given_out := given_out + n;
        rows := '{}';
        FOR r IN SELECT l.* FROM send_log l WHERE l.wire_key = ANY (keys) AND l.state = 'pending' LOOP
            rows := rows || r;
        END LOOP;
        FOR r IN SELECT p.* FROM unnest(rows) AS p
            ORDER BY CASE WHEN (cap_of(p.message_class)).most > 0 THEN lower(p.recipient_key) END NULLS FIRST, p.wire_key
        LOOP
            -- A same-key retry needs the content that the provider knows: the row's own.
            passed_on := options - 'after' || jsonb_strip_nulls(jsonb_build_object('fingerprint', r.fingerprint));
            SELECT * INTO c FROM send_claim(r.send_key, asked.feed, passed_on);
            IF c.outcome = 'held' AND c.reason = 'suppressed' THEN  -- nothing was heard of it: the claim has looked
                SELECT * INTO r FROM send_log l WHERE l.wire_key = r.wire_key;
                PERFORM send_settle(r, 'failed', 'suppressed', 'operator', 'send_claim_campaign', NULL, clock_timestamp());
                c.outcome := 'failed';
            END IF;
            CONTINUE WHEN c.outcome NOT IN ('claimed', 'failed', 'capped');
            given_out := given_out + 1;
            RETURN QUERY SELECT c.outcome, r.send_key, c.wire_key, c.attempt, c.fence, c.seconds_left, c.reason, c.retry_at,
                r.message_class, r.recipient, r.fingerprint, r.payload;
        END LOOP;
        looked_at := looked_at + greatest(cardinality(keys), 1);
        EXIT WHEN given_out = batch OR looked_at >= batch + 1000;
    END LOOP;
END $$;

-- As in 0019: candidates are read first, and then locked one by one.
CREATE OR REPLACE FUNCTION campaign_end_released(campaign text, batch int, who text, note text) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    key text;
    keys text[];
    r send_log;
    ended int := 0;
BEGIN
    PERFORM send_check_isolation();
    IF NOT EXISTS (SELECT 1 FROM campaign c WHERE c.name = $1 AND c.state = 'cancelled') THEN
        RETURN 0;
    END IF;
    keys := ARRAY(SELECT l.wire_key FROM send_log l
        WHERE l.campaign = $1 AND l.state = 'pending' AND l.next_check_at IS NOT NULL ORDER BY l.wire_key LIMIT batch);
    FOREACH key IN ARRAY keys LOOP
        SELECT * INTO r FROM send_log l
        WHERE l.wire_key = key AND l.state = 'pending' AND l.next_check_at IS NOT NULL FOR UPDATE;  -- lock
        CONTINUE WHEN NOT FOUND;
        IF send_heard(r.wire_key, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id) = 'accepted' THEN
            PERFORM send_settle(r, 'sent', 'accepted', 'feed', who, note, clock_timestamp());  -- and look
        ELSE
            PERFORM send_settle(r, 'failed', 'cancelled', 'operator', who, note, clock_timestamp());
        END IF;
        ended := ended + 1;
    END LOOP;
    RETURN ended;
END $$;
