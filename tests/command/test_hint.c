/* SPDX-License-Identifier: MIT
 *
 * Tests which word is suggested for a misspelt one, and that none is for a word that is like no other.
 */
#include "../unit/check.h"

#include "hint.h"

static const struct {
    const char *word, *allowed, *meant; /* "": none */
} words[] = {
    {"--heds", "--batch --heads --kv-heads --help", "--heads"}, /* a letter left out */
    {"--headss", "--batch --heads --help", "--heads"},          /* one too many */
    {"--haeds", "--batch --heads --help", "--heads"},           /* two swapped */
    {"--hexds", "--batch --heads --help", "--heads"},           /* one changed */
    {"--heds=4", "--batch --heads --help", "--heads"},
    {"-heads", "--batch --heads --help", "--heads"},
    {"--hepl", "--batch --heads --help", "--help"},
    {"MHA_Forward", "dense_decode, mha_forward", "mha_forward"},
    {"dense-decode", "dense_decode, mha_forward", "dense_decode"},
    {"vefiry", "run, verify, version", "verify"},
    {"fp8_577", "plain, fp8_656, fp8_576, fp8_528, all", "fp8_576"},
    {"fp8_5288", "fp8_528, fp8_528_split", "fp8_528"},
    {"quik", "cpu, quick", "quick"},
    {"dance", "info, make-input, run, plan", ""},
    {"--frob", "--batch --heads --help", ""},
    {"fp4", "bf16, fp8", ""}, /* too short to be near anything */
    {"", "run, plan", ""},
    {"=", "run, plan", ""},
    {"verify", "", ""},
    {"verify-and-verify-and-verify-and-verify-and-verify", "verify", ""},
    {"verifi", "a-word-that-is-longer-than-any-word-of-the-command-line, verify", "verify"},
};

int main(void)
{
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char text[HINT], expected[HINT] = "";
        if (*words[i].meant) snprintf(expected, sizeof expected, "; did you mean %s?", words[i].meant);
        hint(words[i].word, words[i].allowed, text);
        CHECK(!strcmp(text, expected), "'%s' among '%s': '%s', expected '%s'", words[i].word,
              words[i].allowed, text, expected);
    }
    return check_done("test_hint");
}
