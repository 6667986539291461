-- no-transaction
-- As in 0029, those that are known before a message is submitted.
CREATE INDEX CONCURRENTLY IF NOT EXISTS send_log_known_message_hash ON send_log USING hash (known_message_id)
    WHERE known_message_id IS NOT NULL;
