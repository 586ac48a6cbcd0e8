"""Dashboards for Grafana, made by code, and the check that Prometheus has data for all of them."""
