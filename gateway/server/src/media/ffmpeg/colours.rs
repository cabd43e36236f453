//! How decoded frames become RGB: plainly, over white, or brought down from a high dynamic range.

use super::probe::value;

/// Conversion to RGB that gives the same bytes on every processor.
const EXACT: &str = "bicubic+accurate_rnd+full_chroma_int+bitexact";

/// What must be done to a clip's frames besides conversion.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) enum Colours {
    /// Nothing.
    #[default]
    Plain,
    /// They are transparent, and shown over white as pictures are.
    Transparent,
    /// They are made for screens far brighter than the model's pictures, and mapped to those.
    HighRange(HighRange),
}

/// The code of such frames, in the words of FFmpeg's `zscale` filter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HighRange {
    transfer: &'static str,
    primaries: &'static str,
    matrix: &'static str,
    range: &'static str,
}

impl Colours {
    /// Reads them from the fields of a stream as ffprobe prints it.
    pub(super) fn of_stream(fields: &str) -> Self {
        if value(fields, "codec_name") == Some("apng") {
            return Self::Transparent;
        }
        let transfer = match value(fields, "color_transfer") {
            Some("smpte2084") => "smpte2084",
            Some("arib-std-b67") => "arib-std-b67",
            _ => return Self::Plain,
        };
        // what is not said is what such clips have
        let primaries = match value(fields, "color_primaries") {
            Some("bt709") => "709",
            Some("smpte432") => "smpte432",
            _ => "2020",
        };
        let matrix = match value(fields, "color_space") {
            Some("bt709") => "709",
            Some("gbr") => "gbr",
            Some("bt2020c") => "2020_cl",
            Some("ictcp") => "ictcp",
            _ => "2020_ncl",
        };
        let is_full = value(fields, "color_range") == Some("pc");
        let range = if is_full { "full" } else { "limited" };
        Self::HighRange(HighRange { transfer, primaries, matrix, range })
    }

    /// Whether FFmpeg must have been built with the filter `zscale`.
    pub(super) fn needs_zscale(self) -> bool {
        matches!(self, Self::HighRange(_))
    }

    /// Filters from a decoded frame to RGB of this size.
    pub(super) fn filters(self, width: u32, height: u32) -> String {
        // scaling changes nothing unless the stream changes its size, and then keeps ours
        let plain = format!("scale={width}:{height}:flags={EXACT},format=rgb24");
        match self {
            Self::Plain => plain,
            // colours by their opacity, then the light of white that comes through
            Self::Transparent => format!(
                "format=gbrap,premultiply=inplace=1,lutrgb=a=negval,\
                 colorchannelmixer=ra=1:ga=1:ba=1,{plain}"
            ),
            // light, in the colours of ordinary screens, pressed into what those can show
            Self::HighRange(HighRange { transfer, primaries, matrix, range }) => format!(
                "zscale=transferin={transfer}:primariesin={primaries}:matrixin={matrix}:\
                 rangein={range}:transfer=linear:npl=100,format=gbrpf32le,zscale=primaries=709,\
                 tonemap=tonemap=hable:desat=0,zscale=transfer=709:range=full,format=gbrp,{plain}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stream_does_not_say_of_its_high_range_is_what_such_clips_have() {
        let silent = "codec_name=hevc|color_range=unknown|color_space=unknown|\
                      color_transfer=arib-std-b67|color_primaries=unknown";
        let common = "codec_name=hevc|color_range=tv|color_space=bt2020nc|\
                      color_transfer=arib-std-b67|color_primaries=bt2020";
        assert_eq!(Colours::of_stream(silent), Colours::of_stream(common));
        assert!(Colours::of_stream(common).needs_zscale());
        let full = common.replace("=tv", "=pc");
        assert_ne!(Colours::of_stream(&full), Colours::of_stream(common));
    }

    #[test]
    fn ordinary_clips_are_converted_and_nothing_else() {
        for transfer in ["bt709", "unknown", "smpte170m", "bt2020-10"] {
            let fields = format!("codec_name=h264|color_transfer={transfer}");
            assert_eq!(Colours::of_stream(&fields), Colours::Plain);
        }
        let filters = Colours::Plain.filters(28, 56);
        assert_eq!(filters, format!("scale=28:56:flags={EXACT},format=rgb24"));
    }
}
