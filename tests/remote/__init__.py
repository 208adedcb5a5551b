"""`nox -s remote`: two hosts, a real master, two gateways, two real engines; one restores what the other has stored."""
