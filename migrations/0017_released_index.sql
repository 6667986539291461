-- no-transaction
-- Rows that may be given out again, the oldest release of a feed first. Built beside the senders, who would wait else.
CREATE INDEX CONCURRENTLY IF NOT EXISTS send_log_released ON send_log (feed, released_at, wire_key) WHERE released_at IS NOT NULL;
