"""What the tests stand on: private servers, a fault proxy, an outside ledger, real supervisors."""
