-- no-transaction
-- A campaign's sends that a cap refused, which its status counts. Built beside the senders, who would wait else.
CREATE INDEX CONCURRENTLY IF NOT EXISTS send_log_capped ON send_log (campaign, capped_until)
    WHERE state = 'pending' AND capped_until IS NOT NULL;
