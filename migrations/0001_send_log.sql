-- The send log: one row a logical send, keyed by its wire key. States and their columns are tied by CHECKs, so that
-- impossible rows can't exist. Only the functions of 0005 and 0006 and the reconciler's pass write it.

CREATE TABLE installation (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    namespace text NOT NULL DEFAULT '',         -- tells two installations on one provider account apart
    memory interval NOT NULL DEFAULT '30 days'  -- how long final rows are kept: a job older than this is not guarded
);
INSERT INTO installation DEFAULT VALUES;

-- Never restarts. A fence names one claim of one send, a late writer is recognised by it.
CREATE SEQUENCE send_fence AS bigint;

CREATE TABLE send_log (
    wire_key text PRIMARY KEY CHECK (octet_length(wire_key) BETWEEN 1 AND 48),
    send_key text NOT NULL,
    state text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'claimed', 'sent', 'failed')),
    feed text NOT NULL,
    message_class text NOT NULL DEFAULT 'default',
    recipient text,
    recipient_key text,                         -- normalised; NULL where unknown or several
    campaign text,
    source text,                                -- which of the user's systems sends it
    fingerprint text,                           -- of the content; NULL matches anything, the first that isn't is kept
    payload jsonb,
    intended_at timestamptz,                    -- when the job was made
    not_before timestamptz,
    expires_at timestamptz,

    attempt int NOT NULL DEFAULT 0 CHECK (attempt >= 0),
    not_sent_attempts int NOT NULL DEFAULT 0,   -- attempts proved not to have reached the provider
    fence bigint,
    nonce text,                                 -- of the call that claimed: the same call again gets the same claim
    claimed_by text,
    first_claimed_at timestamptz,               -- never overwritten: a provider's key window starts here
    claimed_at timestamptz,
    submit_by timestamptz,                      -- when the sender's client gives up
    cause text,                                 -- what the sender reported of the running attempt
    answered_at timestamptz,                    -- when the provider's answer was confirmed
    provider_message_id text,
    known_message_id text,                      -- known before the call (Azure)
    response jsonb,

    next_check_at timestamptz,
    released_at timestamptz,
    release_basis text
        CHECK (release_basis IN ('not_sent', 'same_key_retry', 'looked_up', 'absent', 'gave_up', 'operator')),
    retry_until timestamptz,
    may_failover boolean NOT NULL DEFAULT false,
    told int NOT NULL DEFAULT 0,                -- how often it was said, the release included, that it may be sent again
    held_reason text,
    held_since timestamptz,

    verdict_source text CHECK (verdict_source IN ('sender', 'feed', 'look-up', 'operator', 'inferred')),
    verdict_reason text,
    sent_at timestamptz,
    failed_at timestamptz,
    delivery text,                              -- what became of a message that was taken: an outcome, never a state
    delivery_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT claimed_is_watched CHECK (state <> 'claimed'
        OR num_nulls(fence, first_claimed_at, claimed_at, submit_by, next_check_at) = 0 AND attempt > 0),
    CONSTRAINT released_is_watched CHECK (released_at IS NULL
        OR state = 'pending' AND next_check_at IS NOT NULL AND release_basis IS NOT NULL),
    CONSTRAINT basis_belongs_to_release CHECK ((release_basis IS NULL) = (released_at IS NULL)),
    CONSTRAINT retry_until_belongs_to_same_key CHECK ((retry_until IS NOT NULL) = (release_basis IS NOT NULL
        AND release_basis = 'same_key_retry')),
    CONSTRAINT sent_has_its_time CHECK ((state = 'sent') = (sent_at IS NOT NULL)),
    CONSTRAINT failed_has_its_time CHECK ((state = 'failed') = (failed_at IS NOT NULL)),
    CONSTRAINT verdict_has_its_source CHECK ((state IN ('sent', 'failed')) = (verdict_source IS NOT NULL)
        AND (verdict_source IS NULL) = (verdict_reason IS NULL)),
    CONSTRAINT final_is_not_watched CHECK (state IN ('pending', 'claimed') OR next_check_at IS NULL),
    CONSTRAINT held_has_its_time CHECK ((held_reason IS NULL) = (held_since IS NULL)),
    CONSTRAINT not_sent_is_part_of_attempts CHECK (not_sent_attempts BETWEEN 0 AND attempt)
);

-- Rows that a pass looks at: claimed, released, and whatever else has a time of its next look.
CREATE INDEX send_log_due ON send_log (next_check_at, wire_key)
    WHERE state IN ('pending', 'claimed') AND next_check_at IS NOT NULL;
-- Late evidence is looked for from the failed row's side.
CREATE INDEX send_log_failed ON send_log (failed_at, wire_key) WHERE state = 'failed';
CREATE INDEX send_log_controls ON send_log (feed, first_claimed_at)
    WHERE answered_at IS NOT NULL AND attempt = 1;
CREATE INDEX send_log_provider_message ON send_log (feed, provider_message_id) WHERE provider_message_id IS NOT NULL;
CREATE INDEX send_log_known_message ON send_log (feed, known_message_id) WHERE known_message_id IS NOT NULL;

-- Controls: sends to one recipient whose first attempt got the provider's answer. Only they show what a feed tells.
CREATE VIEW control AS
SELECT wire_key, feed, first_claimed_at FROM send_log
WHERE answered_at IS NOT NULL AND attempt = 1 AND (recipient IS NULL OR recipient_key IS NOT NULL);
