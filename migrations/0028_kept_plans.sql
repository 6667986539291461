-- What a sender's session looks for, it looks for by key. A plan that was made while a month was empty, and vacuumed, read
-- that month from end to end for each claim until it was analyzed.
-- Nor is it compiled: until PostgreSQL 18 what reads the one row of `installation` would seem dear enough, each time.
ALTER FUNCTION send_claim(text, text, jsonb) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_claim_released(text, int, jsonb) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_claim_campaign(text, int, jsonb) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_confirm(text, bigint, text, jsonb) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_fail(text, bigint, text, boolean) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_enqueue(text, text, jsonb) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION campaign_hold(text, timestamptz) SET jit = off;  -- as 0026 left them
ALTER FUNCTION campaign_standing(text) SET jit = off;

-- What passes call for each row: the daemon forgets its plans, but behind a pooler it can't.
ALTER FUNCTION send_heard(text, text, text, text, text) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_outcome(send_log) SET enable_seqscan = off SET jit = off;
ALTER FUNCTION send_note_delivery(text) SET enable_seqscan = off SET jit = off;

-- And for each report a plan was made anew, in a third of its time. Citus can't make one without the values.
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus') THEN
        ALTER FUNCTION send_claim(text, text, jsonb) SET plan_cache_mode = force_generic_plan;
        ALTER FUNCTION send_claim_released(text, int, jsonb) SET plan_cache_mode = force_generic_plan;
        ALTER FUNCTION send_claim_campaign(text, int, jsonb) SET plan_cache_mode = force_generic_plan;
        ALTER FUNCTION send_confirm(text, bigint, text, jsonb) SET plan_cache_mode = force_generic_plan;
        ALTER FUNCTION send_fail(text, bigint, text, boolean) SET plan_cache_mode = force_generic_plan;
        ALTER FUNCTION send_enqueue(text, text, jsonb) SET plan_cache_mode = force_generic_plan;
    END IF;
END $$;
