"""The embedded default: a small target model, its EAGLE 3.1 draft, and what made them."""
