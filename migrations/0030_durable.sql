-- What somebody relies on as soon as it is committed: a claim before the provider is called, an event that is answered 200,
-- a pause. Where synchronous_commit is off, for the whole server, a role or the application's own sessions, a crash of the
-- server would take it back without a trace, and the next claim would send again. So whoever writes it commits for certain.
CREATE FUNCTION be_durable() RETURNS trigger
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'on', true);
    RETURN NULL;
END $$;

DO $$
DECLARE
    -- Citus runs no triggers on distributed tables: there each node's own setting counts (docs/citus.md).
    distributed CONSTANT boolean := EXISTS (
        SELECT FROM pg_constraint WHERE conrelid = 'installation'::regclass AND conname = 'no_outbox_on_citus');
    name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['send_log', 'provider_event', 'feed_state', 'idempotency', 'campaign', 'suppression'] LOOP
        CONTINUE WHEN distributed AND name IN ('send_log', 'provider_event');
        EXECUTE format('CREATE TRIGGER be_durable BEFORE INSERT OR UPDATE ON %I FOR EACH STATEMENT'
            ' WHEN (current_setting(''synchronous_commit'') = ''off'') EXECUTE FUNCTION be_durable()', name);
    END LOOP;
END $$;
