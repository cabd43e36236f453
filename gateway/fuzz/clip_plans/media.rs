//! Where these files say that they are.

pub mod ffmpeg;
