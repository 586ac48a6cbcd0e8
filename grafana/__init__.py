"""Code that makes the dashboards for Grafana, and checks that Prometheus has data for them."""
