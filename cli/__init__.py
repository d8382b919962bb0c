"""The `kvcast` command: a module for each subcommand, and what several of them share.

`main` finds the module. Shared are `blocks` (an agent's socket), `folders` (`load` and `fetch`),
`controller_api` (the HTTP API) and `tables`. What daemons share is in `kvcast.service`.
"""
