"""One browser, started once for all tests here: a fixture of a package needs one."""
