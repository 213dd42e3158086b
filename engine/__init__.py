"""The engine: token ids in, token ids out. README.md beside this file is the map.

Importing this package costs nothing. The server may import only the contract: `messages`, `config`,
`errors`, `logs` and `hub`, and for command lines `arguments` and `lab.files`.
"""
