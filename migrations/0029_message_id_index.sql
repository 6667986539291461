-- no-transaction
-- Message ids are only ever looked for whole, and lie in no order: their hashes take a third of the pages, each of which
-- is read, and logged whole after each checkpoint, for the sends that move. Built beside the senders, who would wait else.
CREATE INDEX CONCURRENTLY IF NOT EXISTS send_log_provider_message_hash ON send_log USING hash (provider_message_id)
    WHERE provider_message_id IS NOT NULL;
