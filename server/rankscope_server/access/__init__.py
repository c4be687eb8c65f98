"""Who may do what: roles, tokens and their projects, sessions, the audit log."""
