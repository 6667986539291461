-- What was decided, by whom and on what grounds.

CREATE TABLE pass (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz,
    who text NOT NULL,
    dry_run boolean NOT NULL DEFAULT false,
    feed text,                                  -- a pass over one feed only
    wire_key text,                              -- or over one send only
    counts jsonb NOT NULL DEFAULT '{}'
);
CREATE INDEX pass_started ON pass (started_at);

CREATE TABLE verdict (
    id bigint GENERATED ALWAYS AS IDENTITY,
    wire_key text NOT NULL,
    decided_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempt int NOT NULL,
    fence bigint,
    pass bigint,
    action text NOT NULL CHECK (action IN ('sent', 'failed', 'released', 'held')),
    reason text NOT NULL,
    source text NOT NULL CHECK (source IN ('sender', 'feed', 'look-up', 'operator', 'inferred')),
    who text NOT NULL,
    witnesses jsonb,                            -- what each witness answered
    risk double precision,                      -- of a release: how likely it is to duplicate
    inputs jsonb,                               -- what the risk was computed from
    feed text,                                  -- of the attempt that it ends or judges
    claimed_at timestamptz,
    submit_by timestamptz,
    message_id text,
    note text,                                  -- an operator's reason in words
    PRIMARY KEY (wire_key, id)
);

CREATE TABLE feed_state (
    feed text PRIMARY KEY,                      -- '*' stands for all feeds
    paused_at timestamptz,
    breaker_at timestamptz,
    suspect_at timestamptz,
    reason text,
    who text,
    budget_hour timestamptz,
    budget_used int NOT NULL DEFAULT 0,
    heartbeat bigint NOT NULL DEFAULT 0,
    heartbeat_at timestamptz,
    outcomes_until timestamptz,                 -- up to where deliveries of sent rows have been brought up to date
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

INSERT INTO feed_state (feed) VALUES ('*');     -- always there: whoever pauses or releases meets at its lock

-- How much an event says of what became of a message: the strongest wins, whatever the order of arrival.
CREATE FUNCTION delivery_rank(kind text) RETURNS int LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE kind WHEN 'complained' THEN 6 WHEN 'bounced' THEN 5 WHEN 'rejected' THEN 4 WHEN 'failed' THEN 3
        WHEN 'delivered' THEN 2 WHEN 'opened' THEN 2 WHEN 'clicked' THEN 2 WHEN 'unsubscribed' THEN 2
        WHEN 'subscribed' THEN 2 WHEN 'autoresponded' THEN 2 WHEN 'deferred' THEN 1 ELSE 0 END
$$;
CREATE FUNCTION delivery_name(rank int) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (ARRAY['deferred', 'delivered', 'failed', 'rejected', 'bounced', 'complained'])[rank]
$$;

-- Tells applications that a key may be sent again. Empty until telling is built.
CREATE TABLE release_outbox (
    id bigint GENERATED ALWAYS AS IDENTITY,
    wire_key text NOT NULL,
    what text NOT NULL CHECK (what IN ('released', 'sent', 'failed', 'held')),
    fence bigint,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    next_try_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    tries int NOT NULL DEFAULT 0,
    delivered_at timestamptz,
    cancelled_at timestamptz,
    last_error text,
    PRIMARY KEY (wire_key, id)
);
