#!/bin/sh
# Builds the FFmpeg that a gateway needs and no more: readers and decoders of clips, and of the
# rest only what turns frames into raw pixels. What is not built cannot be attacked.
# Usage: ffmpeg.sh SOURCE PREFIX
# It needs a C compiler, nasm, pkg-config and the headers of libdav1d, zimg (high ranges) and zlib (PNG).
set -eu
source=$1
prefix=$2
cd "$source"
./configure --prefix="$prefix" \
  --disable-everything --disable-autodetect --disable-network --disable-doc --disable-debug \
  --disable-avdevice --disable-postproc --disable-swresample --disable-ffplay \
  --enable-libdav1d --enable-libzimg --enable-zlib \
  --enable-protocol=file,pipe \
  --enable-demuxer=mov,matroska,avi,mpegts,mpegps,mpegvideo,flv,ogg,asf,gif,apng,ivf \
  --enable-decoder=h264,hevc,libdav1d,vp8,vp9,theora,mjpeg,png,apng,gif,rawvideo,ffv1,prores,dnxhd \
  --enable-decoder=mpeg1video,mpeg2video,mpeg4,msmpeg4v1,msmpeg4v2,msmpeg4v3,h263,h263p,flv \
  --enable-decoder=wmv1,wmv2,wmv3,vc1,vp6,vp6f,cinepak,svq3,huffyuv,utvideo \
  --enable-parser=h264,hevc,av1,vp8,vp9,mjpeg,png,gif,mpegvideo,mpeg4video,h263,vc1,dnxhd \
  --enable-bsf=h264_mp4toannexb,hevc_mp4toannexb,vp9_superframe_split,av1_frame_merge \
  --enable-encoder=rawvideo --enable-muxer=rawvideo \
  --enable-filter=select,scale,format,transpose,hflip,vflip,null,buffer,buffersink \
  --enable-filter=zscale,tonemap,premultiply,lutrgb,colorchannelmixer
make -j"$(nproc)" install
