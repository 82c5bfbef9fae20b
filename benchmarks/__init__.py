"""Measurements that anybody can run again; each script has --help and says what it ran on."""
