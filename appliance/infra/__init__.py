"""What every package stands on: settings, database, files, logs, metrics."""
