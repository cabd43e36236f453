/* Rows of a JPEG one band after the other: libjpeg-turbo's own interface to scan lines, its jumps
 * kept on this side. Rust sees an opaque reader, 1 for success and 0 for failure. */

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

#include <jerror.h>

/* Rows asked for at a time: a row of the largest blocks. */
#define STEP 16

struct m3stack_jpeg {
    /* first, so that the library's pointer to it is one to the whole */
    struct jpeg_error_mgr error;
    struct jpeg_decompress_struct state;
    struct jpeg_progress_mgr progress;
    jmp_buf escape;
    int max_scans;
    char message[JMSG_LENGTH_MAX];
};

static struct m3stack_jpeg *of(j_common_ptr state)
{
    return (struct m3stack_jpeg *)state->err;
}

static void give_up(j_common_ptr state)
{
    struct m3stack_jpeg *reader = of(state);
    reader->error.format_message(state, reader->message);
    longjmp(reader->escape, 1);
}

/* Warnings after which the picture is still whole. All others, the early end of a scan above all,
 * mean that some of it is made up. */
static int is_harmless(int code)
{
    switch (code) {
    case JWRN_ADOBE_XFORM:
    case JWRN_BOGUS_ICC:
    case JWRN_BOGUS_PROGRESSION:
    case JWRN_EXTRANEOUS_DATA:
    case JWRN_JFIF_MAJOR:
    case JWRN_NOT_SEQUENTIAL:
        return 1;
    default:
        return 0;
    }
}

static void on_message(j_common_ptr state, int level)
{
    if (level < 0 && !is_harmless(state->err->msg_code))
        give_up(state);
}

static void on_progress(j_common_ptr state)
{
    struct m3stack_jpeg *reader = of(state);
    if (reader->state.input_scan_number > reader->max_scans) {
        snprintf(reader->message, sizeof reader->message, "it has more than %d scans",
                 reader->max_scans);
        longjmp(reader->escape, 1);
    }
}

static int create(struct m3stack_jpeg *reader)
{
    if (setjmp(reader->escape))
        return 0;
    jpeg_create_decompress(&reader->state);
    return 1;
}

struct m3stack_jpeg *m3stack_jpeg_new(void)
{
    struct m3stack_jpeg *reader = calloc(1, sizeof *reader);
    if (reader == NULL)
        return NULL;
    reader->state.err = jpeg_std_error(&reader->error);
    reader->error.error_exit = give_up;
    reader->error.emit_message = on_message;
    reader->progress.progress_monitor = on_progress;
    if (!create(reader)) {
        free(reader);
        return NULL;
    }
    reader->state.progress = &reader->progress;
    return reader;
}

void m3stack_jpeg_free(struct m3stack_jpeg *reader)
{
    jpeg_destroy_decompress(&reader->state);
    free(reader);
}

const char *m3stack_jpeg_message(const struct m3stack_jpeg *reader)
{
    return reader->message;
}

/* Reads the header; `facts` are width, height, and whether pixels are CMYK. */
int m3stack_jpeg_open(struct m3stack_jpeg *reader, const uint8_t *bytes, size_t length,
                      int max_scans, uint32_t facts[3])
{
    j_decompress_ptr state = &reader->state;
    reader->max_scans = max_scans;
    if (setjmp(reader->escape))
        return 0;
    jpeg_mem_src(state, bytes, (unsigned long)length);
    jpeg_read_header(state, TRUE);
    facts[0] = state->image_width;
    facts[1] = state->image_height;
    facts[2] = state->jpeg_color_space == JCS_CMYK || state->jpeg_color_space == JCS_YCCK;
    return 1;
}

/* Ends the header: reads all scans but the last of a progressive file. */
int m3stack_jpeg_start(struct m3stack_jpeg *reader)
{
    j_decompress_ptr state = &reader->state;
    int is_cmyk = state->jpeg_color_space == JCS_CMYK || state->jpeg_color_space == JCS_YCCK;
    if (setjmp(reader->escape))
        return 0;
    state->out_color_space = is_cmyk ? JCS_CMYK : JCS_EXT_RGB;
    state->do_fancy_upsampling = TRUE;
    state->dct_method = JDCT_ISLOW;
    return jpeg_start_decompress(state);
}

/* Writes the next `count` rows, `pitch` bytes apart. */
int m3stack_jpeg_rows(struct m3stack_jpeg *reader, uint8_t *rows, size_t pitch, uint32_t count)
{
    j_decompress_ptr state = &reader->state;
    JSAMPROW pointers[STEP];
    if (count > state->output_height - state->output_scanline)
        return 0;
    if (setjmp(reader->escape))
        return 0;
    const JDIMENSION first = state->output_scanline;
    while (state->output_scanline - first < count) {
        const JDIMENSION done = state->output_scanline - first;
        const JDIMENSION step = count - done < STEP ? count - done : STEP;
        for (JDIMENSION row = 0; row < step; row++)
            pointers[row] = rows + (done + row) * pitch;
        jpeg_read_scanlines(state, pointers, step);
    }
    return 1;
}

/* Reads on to the end of the file, after the last row. */
int m3stack_jpeg_finish(struct m3stack_jpeg *reader)
{
    if (setjmp(reader->escape))
        return 0;
    return jpeg_finish_decompress(&reader->state);
}
