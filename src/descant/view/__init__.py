"""Tables, plots, HTML pages and progress displays.

Imports comparison and all below; never deploy, export or cli."""
