"""Who may do what over HTTP: the rule of each route, tokens, the audit log."""
