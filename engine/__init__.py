"""The engine: token ids in, token ids out. README.md beside this file is the map.

Importing this package costs nothing. The contract, which alone the server may import: `messages`,
`config` and `errors`, and for command lines `arguments` and `lab.files`.
"""
