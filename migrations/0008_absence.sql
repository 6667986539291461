-- What absence is measured with: the sends, controls and ambiguous sends of a feed by time, and what was released when.

-- Recent controls and their history are taken within a message class.
DROP INDEX send_log_controls;
CREATE INDEX send_log_controls ON send_log (feed, message_class, first_claimed_at)
    WHERE answered_at IS NOT NULL AND attempt = 1;
-- How dense the sends of a feed lie.
CREATE INDEX send_log_claims ON send_log (feed, claimed_at) WHERE claimed_at IS NOT NULL;
-- Sends with an attempt of which nobody got the answer, whatever became of them later.
CREATE INDEX send_log_ambiguous ON send_log (feed, claimed_at) INCLUDE (submit_by)
    WHERE claimed_at IS NOT NULL AND attempt - not_sent_attempts > (answered_at IS NOT NULL)::int
      AND (state <> 'failed' OR verdict_source <> 'sender');
-- Those of them that a provider proved accepted, in the order of the proof.
CREATE INDEX send_log_proved ON send_log (feed, sent_at)
    WHERE state = 'sent' AND answered_at IS NULL AND verdict_source IN ('feed', 'look-up');

CREATE FUNCTION recipient_domain(recipient_key text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT substring(recipient_key FROM '@([^@]*)$')
$$;

CREATE OR REPLACE VIEW control AS
SELECT wire_key, feed, first_claimed_at, message_class, recipient_domain(recipient_key) AS domain FROM send_log
WHERE answered_at IS NOT NULL AND attempt = 1 AND (recipient IS NULL OR recipient_key IS NOT NULL);

CREATE VIEW ambiguous AS
SELECT wire_key, feed, claimed_at, submit_by, cause, state, verdict_source, attempt, not_sent_attempts FROM send_log
WHERE claimed_at IS NOT NULL AND attempt - not_sent_attempts > (answered_at IS NOT NULL)::int
  AND (state <> 'failed' OR verdict_source <> 'sender');

-- What feeds said by themselves or were made to repeat: not the sender's answers, nor what was looked up.
CREATE VIEW feed_event AS
SELECT wire_key, feed, received_at, partition_at FROM provider_event
WHERE source IN ('http', 'sqs', 'replay', 'back-fill');

-- Releases that may duplicate, for the hourly budget: the verdicts themselves are counted.
CREATE INDEX verdict_released ON verdict (feed, decided_at)
    WHERE action = 'released' AND reason IN ('absent', 'looked_up', 'gave_up');
-- A person who resumes a feed grants it a new budget.
ALTER TABLE feed_state DROP COLUMN budget_hour, DROP COLUMN budget_used, ADD COLUMN resumed_at timestamptz;

-- A time that drivers can't read would stop every pass that meets it.
ALTER TABLE send_log ADD CONSTRAINT times_are_of_our_era CHECK (
    least(intended_at, not_before, expires_at, first_claimed_at, claimed_at, submit_by, next_check_at, released_at,
          retry_until) >= '1970-01-01 00:00:00+00'
    AND greatest(intended_at, not_before, expires_at, first_claimed_at, claimed_at, submit_by, next_check_at,
                 released_at, retry_until) < '9999-12-31 00:00:00+00');

-- What passes decide of feeds in shadow mode: recorded, and never acted on.
CREATE TABLE shadow_verdict (LIKE verdict INCLUDING DEFAULTS INCLUDING IDENTITY INCLUDING CONSTRAINTS,
    PRIMARY KEY (wire_key, id));
-- Verdicts of a span of time.
CREATE INDEX verdict_decided ON verdict USING brin (decided_at) WITH (autosummarize = on);
CREATE INDEX shadow_verdict_decided ON shadow_verdict USING brin (decided_at) WITH (autosummarize = on);
