-- What was answered to requests that bear an Idempotency-Key. A record is begun, and committed, before its request is
-- performed; it stands for the request until `keep_until`, whatever became of it.

CREATE TABLE idempotency (
    id text PRIMARY KEY,               -- SHA-256 over caller, method, path and key: neither of them is kept
    fingerprint text NOT NULL,         -- of the request's content
    state text NOT NULL DEFAULT 'begun' CHECK (state IN ('begun', 'answered', 'ambiguous', 'anew')),  -- anew: safe to repeat
    run uuid NOT NULL DEFAULT gen_random_uuid(),  -- names who performs it: a late writer is recognised by it
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_until timestamptz NOT NULL,  -- afterwards whoever performs it is taken to have died
    keep_until timestamptz NOT NULL,
    wire_key text,                     -- of the send that the request is about: send_log knows what became of it
    resolves_at timestamptz,           -- of an ambiguous one: when more will be known
    status int,
    headers text,                      -- JSON, pairs; not jsonb, which drivers may be set up to read as they like
    body bytea,
    CONSTRAINT answered_has_its_answer CHECK ((state = 'answered') = (num_nulls(status, headers, body) = 0)
        AND num_nonnulls(status, headers, body) IN (0, 3))
);
CREATE INDEX idempotency_ended ON idempotency (keep_until);

-- How a send stands for whoever asks: its state, told apart where nobody can tell whether the attempt was accepted.
CREATE FUNCTION send_shown_state(r send_log, t timestamptz) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN r.state = 'claimed' AND (r.cause IS NOT NULL OR r.submit_by <= t) THEN 'ambiguous' ELSE r.state END
$$;
