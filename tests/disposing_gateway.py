"""`appliance`, of which a gateway disposes of old entries at once, one tile in each transaction."""

from appliance.audit.disposal import automatic, store
from appliance.cli import main

if __name__ == "__main__":
    automatic.FIRST_SECONDS, automatic.SEEN_SECONDS, store.TILES = 0.0, 0.1, 1
    main()
