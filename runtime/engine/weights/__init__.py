"""Every layout's weights as views of DP's."""
