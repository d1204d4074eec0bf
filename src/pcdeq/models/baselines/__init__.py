"""The models that pcDEQs are compared with, under the same trainer: monDEQ, NODE, ANODE, DEQ, explicit networks."""
