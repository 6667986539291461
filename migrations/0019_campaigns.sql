-- Campaigns: many sends that are loaded together and given out in batches. A recipient's send is an ordinary row of
-- send_log that bears the campaign's name; what was sent to whom stands there and nowhere else, so that a campaign is
-- resumed by looking at what is pending. A name that no row of `campaign` has stays what it was, a label.

CREATE TABLE campaign (
    name text PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'),
    feed text NOT NULL,
    message_class text NOT NULL DEFAULT 'default',
    state text NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused', 'cancelled')),
    starts_at timestamptz,                      -- NULL: as soon as it is loaded
    max_lateness interval NOT NULL DEFAULT '2 hours' CHECK (max_lateness > interval '0'),
    confirmed_at timestamptz,                   -- when a person let it start later than that
    loaded_at timestamptz,                      -- when a file was first loaded to its end: nothing is given out before
    reason text,
    who text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The last load of each file of a campaign. Without an end it is under way, or was broken off.
CREATE TABLE campaign_load (
    campaign text NOT NULL REFERENCES campaign (name),
    source text NOT NULL,                       -- the file's name
    run uuid NOT NULL,                          -- names the run: one that was overtaken by another ends nothing
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz,
    added bigint NOT NULL DEFAULT 0,
    duplicates bigint NOT NULL DEFAULT 0,       -- in the file, of another file, or of an earlier run
    suppressed bigint NOT NULL DEFAULT 0,
    bad_lines bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (campaign, source)
);

-- Whom no campaign writes to, whatever the case of the address.
CREATE TABLE suppression (
    recipient_key text PRIMARY KEY CHECK (recipient_key = lower(recipient_key)),
    reason text,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    source text NOT NULL
);

-- Why a campaign gives out nothing: cancelled, paused, loading, scheduled, late (its time is long over and none of it
-- was given out: a person has to confirm it), or NULL. NULL also for a mere label.
CREATE FUNCTION campaign_hold(campaign text, t timestamptz) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT CASE WHEN c.state <> 'active' THEN c.state
                WHEN c.loaded_at IS NULL THEN 'loading'
                WHEN c.starts_at > t THEN 'scheduled'
                WHEN c.confirmed_at IS NULL AND c.starts_at < t - c.max_lateness
                 AND NOT EXISTS (SELECT FROM send_log l WHERE l.campaign = c.name AND l.state = 'claimed')
                 AND NOT EXISTS (SELECT FROM send_log l WHERE l.campaign = c.name AND l.state = 'sent') THEN 'late' END
    FROM campaign c WHERE c.name = $1
$$;

-- How a campaign stands: its hold, finished (every file was loaded to its end, and nothing is pending or claimed), or
-- active. NULL: there is none of that name.
CREATE FUNCTION campaign_standing(campaign text) RETURNS text
LANGUAGE sql VOLATILE SET search_path FROM CURRENT AS $$
    SELECT coalesce(campaign_hold(c.name, clock_timestamp()),
        CASE WHEN NOT EXISTS (SELECT FROM campaign_load f WHERE f.campaign = c.name AND f.ended_at IS NULL)
              AND NOT EXISTS (SELECT FROM send_log l WHERE l.campaign = c.name AND l.state = 'pending')
              AND NOT EXISTS (SELECT FROM send_log l WHERE l.campaign = c.name AND l.state = 'claimed')
             THEN 'finished' ELSE 'active' END)
    FROM campaign c WHERE c.name = $1
$$;

-- Why a row of a campaign may not be given out now, whoever asks for it: (reason, when to ask again), or no row. Whoever
-- pauses or cancels waits for the lock: once that has returned, nothing is given out. Those whom a hold refuses anyway
-- don't take it, they would keep `pause` waiting.
CREATE FUNCTION campaign_refusal(r send_log, t timestamptz) RETURNS TABLE (reason text, retry_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    hold text := campaign_hold(r.campaign, t);
BEGIN
    IF hold IS NULL THEN
        PERFORM FROM campaign c WHERE c.name = r.campaign FOR KEY SHARE;
        IF NOT FOUND THEN RETURN; END IF;  -- a label
        hold := campaign_hold(r.campaign, t);
    END IF;
    IF hold IS NOT NULL THEN
        RETURN QUERY SELECT 'campaign_' || hold, CASE WHEN hold = 'scheduled' THEN c.starts_at END
            FROM campaign c WHERE c.name = r.campaign;
    ELSIF EXISTS (SELECT FROM suppression p WHERE p.recipient_key = lower(r.recipient_key)) THEN
        RETURN QUERY SELECT 'suppressed', NULL::timestamptz;
    END IF;
END $$;

-- As in 0013, and what a row's campaign says.
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

-- Claims up to `batch` sends of a campaign, in the order of their wire keys, fresh and released ones alike, each through
-- send_claim with all its guards. Many workers may ask at once and don't wait for each other. Nothing can refuse it inside
-- a transaction, whose rollback would forget claims that were submitted: see send_claim_campaign_commit. Rows: outcome
-- `claimed`, and `failed` for those who were suppressed since they were loaded (they count in `batch`). None: nothing may
-- be given out now; see campaign_standing. Options: submit_within, claimed_by, and after: a wire key to begin behind, so
-- that a worker doesn't walk each time over what is done; one who gets nothing begins anew.
CREATE FUNCTION send_claim_campaign(campaign text, batch int, options jsonb)
RETURNS TABLE (outcome text, send_key text, wire_key text, attempt int, fence bigint, seconds_left double precision,
    reason text, retry_at timestamptz, message_class text, recipient text, fingerprint text, payload jsonb)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT SET timezone = 'UTC' AS $$
#variable_conflict use_column
DECLARE
    t CONSTANT timestamptz := clock_timestamp();
    asked record;
    hold text;
    c record;
    passed_on jsonb;
    given_out int := 0;
    -- Rows that would surely be refused are left out, lest they hide the others.
    waiting CURSOR FOR SELECT l.* FROM send_log l
        WHERE l.campaign = send_claim_campaign.campaign AND l.state = 'pending'
          AND l.wire_key > coalesce(options ->> 'after', '')
          AND l.feed = asked.feed AND l.held_reason IS NULL
          AND (l.not_before IS NULL OR l.not_before <= t) AND (l.expires_at IS NULL OR l.expires_at > t)
          AND (l.retry_until IS NULL OR l.retry_until > t + coalesce((options ->> 'submit_within')::interval, '60 seconds'))
          AND (hold IS NULL OR l.release_basis IS NULL OR l.release_basis IN ('not_sent', 'operator'))
        ORDER BY l.wire_key
        LIMIT batch + 1000
        FOR UPDATE SKIP LOCKED;
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
    hold := send_hold(asked.feed);
    IF hold = 'suspect' OR campaign_hold(asked.name, t) IS NOT NULL THEN RETURN; END IF;
    -- As campaign_refusal does for each row: here, so that a pause refuses the batch at once and leaves its rows alone.
    PERFORM FROM campaign k WHERE k.name = asked.name FOR KEY SHARE;
    IF campaign_hold(asked.name, t) IS NOT NULL THEN RETURN; END IF;
    FOR r IN waiting LOOP
        -- A same-key retry needs the content that the provider knows: the row's own.
        passed_on := options - 'after' || jsonb_strip_nulls(jsonb_build_object('fingerprint', r.fingerprint));
        SELECT * INTO c FROM send_claim(r.send_key, asked.feed, passed_on);
        IF c.outcome = 'held' AND c.reason = 'suppressed' THEN  -- nothing was heard of it: the claim has looked
            PERFORM send_settle(l, 'failed', 'suppressed', 'operator', 'send_claim_campaign', NULL, clock_timestamp())
            FROM send_log l WHERE l.wire_key = r.wire_key;
            c.outcome := 'failed';
        END IF;
        CONTINUE WHEN c.outcome NOT IN ('claimed', 'failed');
        given_out := given_out + 1;
        RETURN QUERY SELECT c.outcome, r.send_key, c.wire_key, c.attempt, c.fence, c.seconds_left, c.reason, c.retry_at,
            r.message_class, r.recipient, r.fingerprint, r.payload;
        EXIT WHEN given_out = batch;  -- here: the next row would be locked by being looked at
    END LOOP;
END $$;

-- The same, committed before it answers: PostgreSQL refuses it inside a caller's transaction. The claims are an array of
-- objects, which have the columns of send_claim_campaign.
DO $do$ BEGIN EXECUTE format($create$
CREATE PROCEDURE send_claim_campaign_commit(campaign text, batch int, options jsonb, INOUT claims jsonb DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    SELECT coalesce(jsonb_agg(to_jsonb(c)), '[]') INTO claims FROM %I.send_claim_campaign(campaign, batch, options) AS c;
    COMMIT;
END $$
$create$, current_schema()); END $do$;

-- Ends up to `batch` sends of a cancelled campaign that passes would else look at for ever: released ones, which are
-- failed (cancelled), or sent where acceptance was heard of. Returns how many were ended. Those that were never claimed
-- stay pending as they are: their campaign refuses every claim of them, and nobody looks at them.
CREATE FUNCTION campaign_end_released(campaign text, batch int, who text, note text) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    r send_log;
    keys text[];
    ended int := 0;
BEGIN
    PERFORM send_check_isolation();
    keys := ARRAY(SELECT l.wire_key FROM send_log l
        WHERE l.campaign = campaign_end_released.campaign AND l.state = 'pending' AND l.next_check_at IS NOT NULL
          AND EXISTS (SELECT FROM campaign c WHERE c.name = campaign_end_released.campaign AND c.state = 'cancelled')
        ORDER BY l.wire_key LIMIT batch FOR UPDATE);  -- lock
    FOR r IN SELECT * FROM send_log l WHERE l.wire_key = ANY (keys) AND l.state = 'pending' ORDER BY l.wire_key LOOP
        IF send_heard(r.wire_key, r.feed, r.recipient_key, r.provider_message_id, r.known_message_id) = 'accepted' THEN
            PERFORM send_settle(r, 'sent', 'accepted', 'feed', who, note, clock_timestamp());  -- and look
        ELSE
            PERFORM send_settle(r, 'failed', 'cancelled', 'operator', who, note, clock_timestamp());
        END IF;
        ended := ended + 1;
    END LOOP;
    RETURN ended;
END $$;
