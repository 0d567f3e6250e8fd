"""
The life of a draft: judged, registered, refreshed from the site's own traffic, tried out, put into service.
"""
