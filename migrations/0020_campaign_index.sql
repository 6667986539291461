-- no-transaction
-- A campaign's sends by state, in the order in which they are given out. Other rows are in no such index. Built beside the senders, who would wait else.
CREATE INDEX CONCURRENTLY IF NOT EXISTS send_log_campaign ON send_log (campaign, state, wire_key) WHERE campaign IS NOT NULL;
