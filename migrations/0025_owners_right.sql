-- Senders get by with functions alone: what they call runs with the owner's right, so that a sender's role needs no table
-- and can't change the ledger in any other way. The procedures that commit stay as they are, since PostgreSQL lets no
-- such function commit: they call these. Who replaces one of them later says SECURITY DEFINER again.

ALTER FUNCTION send_claim(text, text, jsonb) SECURITY DEFINER;
ALTER FUNCTION send_claim_released(text, int, jsonb) SECURITY DEFINER;
ALTER FUNCTION send_claim_campaign(text, int, jsonb) SECURITY DEFINER;
ALTER FUNCTION send_confirm(text, bigint, text, jsonb) SECURITY DEFINER;
ALTER FUNCTION send_fail(text, bigint, text, boolean) SECURITY DEFINER;
ALTER FUNCTION send_enqueue(text, text, jsonb) SECURITY DEFINER;
ALTER FUNCTION campaign_standing(text) SECURITY DEFINER;

-- What runs with the owner's right is nobody's who wasn't granted it. Roles that have been granted tables go on: who could
-- do it by himself until now may call what does it.
DO $$
DECLARE
    function regprocedure;
    touched regclass;
    needed text;
    grantee text;
BEGIN
    FOR function, touched, needed IN VALUES
        ('send_claim(text, text, jsonb)'::regprocedure, 'send_log'::regclass, 'UPDATE'),
        ('send_claim_released(text, int, jsonb)', 'send_log', 'UPDATE'),
        ('send_claim_campaign(text, int, jsonb)', 'send_log', 'UPDATE'),
        ('send_confirm(text, bigint, text, jsonb)', 'send_log', 'UPDATE'),
        ('send_fail(text, bigint, text, boolean)', 'send_log', 'UPDATE'),
        ('send_enqueue(text, text, jsonb)', 'send_log', 'INSERT'),
        ('send_note_asked_again(text, text, timestamptz)', 'send_log', 'UPDATE'),
        ('campaign_standing(text)', 'send_log', 'SELECT'),
        ('send_fence_lift(text)', 'feed_state', 'UPDATE'),
        ('provider_event_make_partitions(int)', 'provider_event', 'INSERT'),
        ('provider_event_drop_month(date, interval)', 'provider_event', 'DELETE')
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', function);
        FOR grantee IN
            SELECT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END
            FROM pg_class c, aclexplode(c.relacl) AS a
            WHERE c.oid = touched AND a.privilege_type = needed AND a.grantee <> c.relowner
        LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', function, grantee);
        END LOOP;
    END LOOP;
END $$;
