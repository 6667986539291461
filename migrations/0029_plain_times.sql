-- Whom an operator's verb refuses is told until when a sender may still submit: in UTC, and as ISO writes it, whatever the
-- database or the role has set.
ALTER FUNCTION operator_release(text, text, text) SET timezone = 'UTC' SET datestyle = 'ISO';
ALTER FUNCTION operator_decide(text, text, text, text) SET timezone = 'UTC' SET datestyle = 'ISO';
