"""The demo pair: a small target model, its EAGLE 3.1 draft, and the scripts that train them."""
