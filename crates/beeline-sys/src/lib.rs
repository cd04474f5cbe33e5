//! Every foreign call and raw pointer of Beeline, behind owning handles.
