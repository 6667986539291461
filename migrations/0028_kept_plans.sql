-- What a sender's session looks for, it looks for by key. A plan that was made while a month was empty, and vacuumed, read
-- that month from end to end for each claim until it was analyzed; and for each report a plan was made anew, in a third
-- of its time.
ALTER FUNCTION send_claim(text, text, jsonb) SET enable_seqscan = off SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION send_claim_released(text, int, jsonb) SET enable_seqscan = off SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION send_claim_campaign(text, int, jsonb) SET enable_seqscan = off SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION send_confirm(text, bigint, text, jsonb) SET enable_seqscan = off SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION send_fail(text, bigint, text, boolean) SET enable_seqscan = off SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION send_enqueue(text, text, jsonb) SET enable_seqscan = off SET plan_cache_mode = force_generic_plan;
