-- A database that was restored from a backup must be noticed. What each heartbeat leaves here is compared with what
-- processes remember outside of the database; columns that a suspicion and its end need stand beside it.

ALTER TABLE feed_state
    ADD COLUMN system_identifier bigint,        -- the server of the last heartbeat; NULL: it could not be read
    ADD COLUMN timeline bigint,                 -- and its WAL time line
    ADD COLUMN line_from bigint NOT NULL DEFAULT 0, -- the first heartbeat on this server and time line
    ADD COLUMN heartbeat_seen bigint NOT NULL DEFAULT 0, -- of a suspicion: the highest heartbeat that anybody remembers
    ADD COLUMN fence_seen bigint NOT NULL DEFAULT 0; -- and the highest fence

-- The server that answers, and its WAL time line; NULL where it doesn't say (some hosted ones don't), which matches any.
CREATE FUNCTION database_line(OUT system_identifier bigint, OUT timeline bigint)
LANGUAGE plpgsql VOLATILE SET search_path FROM CURRENT AS $$
#variable_conflict use_column
BEGIN
    SELECT c.system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
    INTO database_line.system_identifier, database_line.timeline
    FROM pg_control_system() AS c;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN;
END $$;

-- Makes every fence to come greater than those given out before a restore, remembered or not. Does nothing unless the
-- feed is suspect. The owner's right, since those who may use a sequence may not set it.
CREATE FUNCTION send_fence_lift(feed text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path FROM CURRENT AS $$
#variable_conflict use_column
DECLARE
    seen bigint;
BEGIN
    SELECT s.fence_seen INTO seen FROM feed_state s WHERE s.feed = $1 AND s.suspect_at IS NOT NULL FOR UPDATE;
    IF FOUND THEN
        PERFORM setval('send_fence', greatest(pg_sequence_last_value('send_fence'), seen, 0) + 1000000000);
    END IF;
END $$;
